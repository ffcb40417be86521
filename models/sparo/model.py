# SPDX-License-Identifier: Apache-2.0
"""SPARO: an image and a text tower whose codes consist of separately attended slots."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.budget import ComputeBudget
from saccade.models.interface import Component, Family
from saccade.models.layers.swin import SwinBlock
from saccade.models.layers.transformer import Block
from saccade.models.layers.trunk import block_layers
from saccade.models.sparo.components import components_of
from saccade.models.sparo.config import SparoConfig as SparoConfig
from saccade.models.sparo.pooling import PoolingOutput, pool
from saccade.models.sparo.readout import selected
from saccade.models.sparo.towers import ImageTower, StagedTower, TextTower

PROBED_BLOCKS = 4  # whose class tokens a linear probe gets


class Sparo(nn.Module, Family):
    """Two towers (or only the image tower), each with a pooling of its tokens into a code.

    Source: Vani et al. 2024, SPARO, section 3; the configuration names the baselines.
    """

    config_class = SparoConfig
    repeated_blocks = (Block, SwinBlock)
    slot_order: Tensor
    slot_mask: Tensor

    def __init__(self, config: SparoConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            tower = ImageTower if config.trunk == "vit" else StagedTower
            self.image: nn.Module = tower(config)
            self.image_pool = pool(config, "image")
            if config.text:
                self.text = TextTower(config)
                self.text_pool = pool(config, "text")
                self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
            if config.pooling == "codebook":
                self.codebook = nn.Parameter(torch.randn(config.codes, config.feature_dim))
        if config.pooling == "sparo":
            count = len(config.kept_slots)
            self.register_buffer("slot_order", torch.arange(count))
            if config.masked:
                self.register_buffer("slot_mask", torch.ones(count, config.slot_dim))

    def encode_image(self, image: Tensor) -> PoolingOutput:
        """Return the code of an image and its parts.

        Shapes: image [b h w c], values 0 to 255 of any type.
        """
        return encode_image(self, image)

    def encode_text(self, tokens: Tensor) -> PoolingOutput:
        """Return the code of a text and its parts.

        Shapes: tokens [b context_length] int64.
        """
        return encode_text(self, tokens)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Return the similarity of each image to each text.

        Shapes: image [i h w c], tokens [t context_length] -> [i t], as logits.
        """
        return (
            self.logit_scale.exp()
            * self.encode_image(image).code
            @ self.encode_text(tokens).code.mT
        )

    def parameter_layers(self) -> tuple[tuple[str, ...], ...]:
        """Return both towers before their blocks, their blocks by index, and what follows them."""
        towers = ("image", "text") if self.config.text else ("image",)
        tower_blocks = [_blocks(self.get_submodule(tower), tower) for tower in towers]
        most = max(map(len, tower_blocks))
        # The shorter tower ends where the longer one does.
        padded = [((),) * (most - len(blocks)) + blocks for blocks in tower_blocks]
        blocks = (sum(parts, ()) for parts in zip(*padded, strict=True))
        return (towers, *blocks, ("image_pool", "text_pool"))

    def components(self) -> tuple[Component, ...]:
        """Return the image tower and, if there is one, the text tower."""
        return components_of(self)

    def at(self, budget: ComputeBudget) -> "Sparo":
        """Return the model with the first slots of `slot_order`, itself for all of them."""
        if budget.label == "b1000":
            return self
        return self.keep(self.slot_order[: budget.kept].tolist())

    @torch.no_grad()
    def keep(self, slots: Sequence[int]) -> "Sparo":
        """Return the model with these slots in both towers, its code normalized over them.

        `slots` are positions among this model's slots, in any order.
        Raises: SaccadeError if there are none, one is out of range or repeated, or a baseline
            has no slots.
        """
        config = self.config
        total = len(config.kept_slots)
        chosen = sorted(set(slots))
        fits = chosen and len(chosen) == len(slots) and 0 <= chosen[0] <= chosen[-1] < total
        if config.pooling != "sparo" or not fits:
            raise SaccadeError(
                f"slots {list(slots)[:8]}: expected distinct numbers from 0 to {total - 1} "
                f"for a model with pooling 'sparo' (found '{config.pooling}'). Choose others."
            )
        kept = tuple(config.kept_slots[slot] for slot in chosen)
        smaller = Sparo(replace(config, kept=kept), fresh=False).to(self.slot_order.device)
        smaller = smaller.to(next(self.parameters()).dtype)
        smaller.load_state_dict(self._state_of(chosen))
        return smaller.train(self.training)

    def _state_of(self, chosen: list[int]) -> dict[str, Tensor]:
        state = {name: value.clone() for name, value in self.state_dict().items()}
        for tower in ("image", "text"):
            prefix = f"{tower}_pool.read_out."
            own_state = {
                k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)
            }
            if own_state:
                cut = selected(own_state, self.config.read_out(tower), chosen)
                state |= {prefix + name: value for name, value in cut.items()}
        place = {slot: position for position, slot in enumerate(chosen)}
        order = [place[slot] for slot in self.slot_order.tolist() if slot in place]
        state["slot_order"] = torch.tensor(order, device=self.slot_order.device)
        if self.config.masked:
            state["slot_mask"] = state["slot_mask"][torch.tensor(chosen)]
        return state

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the metadata needed to encode texts and to compare codes."""
        config = self.config
        slots = list(config.kept_slots) if config.pooling == "sparo" else []
        metadata: dict[str, Any] = {"slots": slots, "slots_sha256": slots_sha256(slots)}
        if config.text:
            metadata |= {
                "logit_scale": float(self.logit_scale.detach().double().exp()),
                "context_length": config.context_length,
                "tokenizer": config.tokenizer,
                "vocabulary": config.vocabulary,
                "words": list(config.words),
                "merges": list(config.merges),
            }
        return metadata


def _blocks(tower: nn.Module, place: str) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each block of a tower called `place`."""
    if isinstance(tower, StagedTower):
        return block_layers(tower.trunk, f"{place}.trunk")
    count = len(list(tower.get_submodule("blocks").children()))
    return tuple((f"{place}.blocks.{index}",) for index in range(count))


def encode_image(model: Any, image: Tensor) -> PoolingOutput:
    """Encode an image with a Sparo or its folded form.

    Shapes: image [b h w c], values 0 to 255 of any type.
    """
    codebook = model.codebook if model.config.pooling == "codebook" else None
    if model.config.first_tokens:
        tokens, classes = model.image.with_first(image)
    else:
        tokens, classes = model.image(image), ()
    pooled: PoolingOutput = model.image_pool(tokens, None, codebook)
    if classes and not model.training:
        pooled = pooled._replace(probe_features=_probe_features(model, classes, pooled.raw))
    if not model.config.masked or pooled.slots is None:
        return pooled
    # Masks were trained on cosines, so the code gets length 1 again.
    code = F.normalize((pooled.slots * model.slot_mask).flatten(1), dim=-1)
    return pooled._replace(code=code, slots=code.unflatten(1, model.slot_mask.shape))


def _probe_features(model: Any, classes: Sequence[Tensor], raw: Tensor | None) -> Tensor:
    """Return the class tokens after the last four blocks, normalized by the norm of all tokens.

    Slots before their normalization take the place of the last one.

    Shapes: classes [b w], raw [b k v] -> [b f].
    Source: Vani et al. 2024, appendix C.2; DINO's linear probe (Caron et al. 2021).
    """
    norm = model.get_submodule(model.config.trunk_norm)
    count = PROBED_BLOCKS if raw is None else PROBED_BLOCKS - 1
    parts = [norm(token) for token in classes[-count:]]
    if raw is not None:
        # Of types with gates, a gate comes before the slot.
        parts.append(raw[..., -model.config.slot_dim :].flatten(1))
    return torch.cat(parts, 1)


def encode_text(model: Any, tokens: Tensor) -> PoolingOutput:
    """Encode a text with a Sparo or its folded form.

    Shapes: tokens [b context_length] int64.
    """
    query = model.codebook if model.config.pooling == "codebook" else None
    if model.config.share_queries:
        query = getattr(model.image_pool.read_out, "query", None)  # None if it is folded
    pooled: PoolingOutput = model.text_pool(model.text(tokens), model.text.end(tokens), query)
    return pooled


def slots_sha256(slots: Sequence[int]) -> str:
    """Return the hash that two variants must share for their codes to be comparable.

    It is the SHA-256 of the ascending slot numbers as a JSON list.
    """
    return hashlib.sha256(json.dumps(sorted(slots), separators=(",", ":")).encode()).hexdigest()
