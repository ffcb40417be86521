# SPDX-License-Identifier: Apache-2.0
"""Ranking of slots by the accuracy of each alone or by trained masks, and the codes it needs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.files import read_bounded, write_atomically
from saccade.core.json_text import parse_json
from saccade.core.schema import Length, Share, field_kinds, typed
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.pooling import PoolingOutput
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import class_vectors, unit

_CHUNK = 200


@torch.no_grad()
def image_slots(model: Sparo, images: np.ndarray) -> np.ndarray:
    """Return the codes of images, by slot if there are slots.

    Shapes: images [n h w c] uint8 -> [n l v], or [n 1 e] for a baseline.
    """
    device = next(model.parameters()).device
    parts = (np.asarray(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK))
    return _gathered([model.encode_image(torch.from_numpy(part).to(device)) for part in parts])


@torch.no_grad()
def text_slots(model: Sparo, texts: Sequence[str], *, truncate: bool = False) -> np.ndarray:
    """Return the codes of texts, by slot if there are slots; `truncate` cuts texts that are long.

    Shapes: -> [len(texts) l v], or [len(texts) 1 e] for a baseline.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(encode_texts(model.runtime_metadata(), texts, truncate=truncate))
    return _gathered([model.encode_text(part.to(device)) for part in tokens.split(_CHUNK)])


def _gathered(pooled: Sequence[PoolingOutput]) -> np.ndarray:
    arrays = [batch.code.unsqueeze(1) if batch.slots is None else batch.slots for batch in pooled]
    return torch.cat(arrays).float().cpu().numpy()


Kind = Literal["accuracy", "negatives", "slot", "dimension"]
KINDS = get_args(Kind)
_MOMENTUM = 0.9
_BATCH = 256  # samples per step; the paper gives no number


@dataclass(frozen=True)
class Selection:
    """The content of a selection's file: slots in their order, and a mask of the image codes."""

    order: tuple[int, ...]
    mask: Annotated[tuple[tuple[Share, ...], ...] | tuple[Share, ...], Length(1)] | None
    kind: Kind
    data: str
    checkpoint_sha256: str

    def __post_init__(self) -> None:
        if self.mask and len({np.size(row) for row in self.mask}) > 1:
            raise SaccadeError("mask: found rows of different lengths, expected equal ones.")


def rank_slots(
    images: np.ndarray, labels: np.ndarray, texts: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """Rank slots by the zero-shot accuracy of each alone (ties by index); return both.

    Shapes: images [n l v], labels [n], texts [classes prompts l v] -> accuracies [l].
    Source: Vani et al. 2024, section 5.1.
    """
    classes = np.stack([class_vectors(texts[:, :, slot]) for slot in range(texts.shape[2])])
    logits = unit(images).transpose(1, 0, 2) @ classes.transpose(0, 2, 1)
    return _ranked((logits.argmax(-1) == labels).mean(-1))


def rank_by_negatives(
    images: np.ndarray, positives: np.ndarray, negatives: np.ndarray
) -> tuple[list[int], np.ndarray]:
    """Rank slots by the share of samples whose true text is nearer than the false one.

    Shapes: images, positives, negatives [n l v] -> accuracies [l].
    """
    image = unit(images)
    nearer = (image * (unit(positives) - unit(negatives))).sum(-1) > 0
    return _ranked(nearer.mean(0))


def _ranked(scores: np.ndarray) -> tuple[list[int], np.ndarray]:
    return np.argsort(-scores, kind="stable").tolist(), scores


def train_masks(
    images: np.ndarray,
    positives: np.ndarray,
    negatives: np.ndarray,
    *,
    kind: str = "slot",
    epochs: int = 100,
    learning_rate: float = 0.02,
    seed: int = 0,
) -> tuple[np.ndarray, float]:
    """Train a mask of the image codes that brings true texts nearest; return it and its score.

    m = sigmoid(s theta / 4) with s = max(100, exp(alpha)). The logits of a cross entropy are s
    times the cosines of the masked code with both texts. SGD has momentum 0.9. theta starts at 0
    (all halves, which is not a mask), and the mask of the best epoch is kept; the paper leaves
    both open. The score is the share of samples whose true text is nearer.

    Shapes: images, positives, negatives [n l v], slots as in the models' codes -> [l]
            (kind slot) or [l v] (dimension).
    Raises: SaccadeError if the kind is unknown.
    Source: Vani et al. 2024, section 5.2 and appendix C.1.
    """
    if kind not in KINDS[2:]:
        raise SaccadeError(f"masks {kind!r} are unknown. Choose slot or dimension.")
    # Slots are not normalized one by one: the mask multiplies slots as a model weights them.
    image, *texts = (torch.from_numpy(codes).float() for codes in (images, positives, negatives))
    shape = image.shape[1:] if kind == "dimension" else (*image.shape[1:2], 1)
    theta = torch.zeros(shape, requires_grad=True)
    alpha = torch.tensor(math.log(100.0), requires_grad=True)
    optimizer = torch.optim.SGD((theta, alpha), lr=learning_rate, momentum=_MOMENTUM)
    generator = torch.Generator().manual_seed(seed)
    best, kept = _fit(image, texts, _mask(theta, alpha)), _mask(theta, alpha).detach()
    for _ in range(epochs):
        for chosen in torch.randperm(len(image), generator=generator).split(_BATCH):
            cosines = _cosines(
                image[chosen], [codes[chosen] for codes in texts], _mask(theta, alpha)
            )
            target = torch.zeros(len(chosen), dtype=torch.long)
            loss = F.cross_entropy(_scale(alpha) * cosines, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        fit = _fit(image, texts, _mask(theta, alpha))
        if fit > best:
            best, kept = fit, _mask(theta, alpha).detach()
    return (kept if kind == "dimension" else kept.squeeze(-1)).numpy(), best


def _scale(alpha: Tensor) -> Tensor:
    return alpha.exp().clamp(min=100)


def _mask(theta: Tensor, alpha: Tensor) -> Tensor:
    return (theta * _scale(alpha) / 4).sigmoid()


def _cosines(image: Tensor, texts: Sequence[Tensor], mask: Tensor) -> Tensor:
    masked = F.normalize((image * mask).flatten(1), dim=-1)
    codes = [F.normalize(codes.flatten(1), dim=-1) for codes in texts]
    return torch.stack([(masked * vectors).sum(-1) for vectors in codes], 1)


@torch.no_grad()
def _fit(image: Tensor, texts: Sequence[Tensor], mask: Tensor) -> float:
    cosines = _cosines(image, texts, mask)
    return (cosines[:, 0] > cosines[:, 1]).double().mean().item()


def selection(
    *,
    kind: str,
    data: str,
    checkpoint_sha256: str,
    order: Sequence[int] | None = None,
    mask: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return a selection as JSON values; without an order, slots are sorted by their mean mask."""
    if order is None:
        assert mask is not None
        order = _ranked(mask.reshape(len(mask), -1).mean(1))[0]
    return {
        "order": list(order),
        "mask": None if mask is None else mask.tolist(),
        "kind": kind,
        "data": data,
        "checkpoint_sha256": checkpoint_sha256,
    }


def write_selection(path: Path, chosen: Mapping[str, Any], *, replace: bool = True) -> None:
    """Write a selection as JSON.

    Raises: SaccadeError if it cannot be written, or exists and `replace` is false.
    """
    data = (json.dumps(dict(chosen), indent=1) + "\n").encode()
    write_atomically(path, data, replace=replace)


def read_selection(path: Path) -> dict[str, Any]:
    """Read the selection that `write_selection` wrote.

    Raises: SaccadeError if the file cannot be read or is not a selection.
    """
    try:
        content = parse_json(read_bounded(path, limits.JSON_BYTES))
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: not a readable selection of slots ({error}). Write one with: saccade select"
        ) from error
    try:
        typed(Selection, content, "")
    except SaccadeError as error:
        raise SaccadeError(
            f"{path}: expected the keys {sorted(field_kinds(Selection))} with a kind of "
            f"{', '.join(KINDS)}, an order of whole numbers, and a mask of numbers or null. "
            "Write one with: saccade select"
        ) from error
    values: dict[str, Any] = content
    return values


def with_selection(
    model: nn.Module, chosen: Mapping[str, Any], checkpoint_sha256: str | None = None
) -> Sparo:
    """Return the model with that order of slots, which budgets follow, and with that mask.

    Raises: SaccadeError if the order does not fit this model's slots, the mask has another shape,
        or the selection was made for another checkpoint (if its hash is given).
    """
    if not isinstance(model, Sparo) or model.config.pooling != "sparo":
        raise SaccadeError(
            "this model has no slots to select. Pass a checkpoint with pooling 'sparo', not a "
            "baseline."
        )
    config = model.config
    if checkpoint_sha256 not in (None, chosen["checkpoint_sha256"]):
        raise SaccadeError(
            f"the slots were selected for checkpoint {chosen['checkpoint_sha256'][:12]}, but this "
            f"is {str(checkpoint_sha256)[:12]}. Run saccade select on this checkpoint."
        )
    count, order = len(config.kept_slots), list(chosen["order"])
    if sorted(order) != list(range(count)):
        raise SaccadeError(
            f"the selection orders {len(order)} slots, expected every number from 0 to "
            f"{count - 1} once. Run saccade select on this checkpoint."
        )
    state = model.state_dict() | {"slot_order": torch.tensor(order)}
    if chosen["mask"] is not None:
        state["slot_mask"] = _full_mask(chosen["mask"], (count, config.slot_dim))
    masked = config.masked or chosen["mask"] is not None
    changed = Sparo(replace(config, masked=masked), fresh=False)
    parameter = next(model.parameters())
    changed.to(parameter.device, parameter.dtype)
    changed.load_state_dict(state)
    return changed.train(model.training)


def _full_mask(values: Any, shape: tuple[int, int]) -> Tensor:
    mask = torch.tensor(values, dtype=torch.float64)
    if mask.shape not in ((shape[0],), shape) or not bool(((mask >= 0) & (mask <= 1)).all()):
        raise SaccadeError(
            f"the selection's mask has shape {list(mask.shape)}, expected [{shape[0]}] or "
            f"{list(shape)} with values from 0 to 1. Run saccade select on this checkpoint."
        )
    return (mask if mask.dim() == 2 else mask[:, None]).expand(shape)
