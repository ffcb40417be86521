# SPDX-License-Identifier: Apache-2.0
"""The function of a SPARO model, and its components: one for images, one for texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.interface import Arrays, Component, TensorSpec, image_spec
from saccade.models.sparo.config import PROBE_FEATURES, SparoConfig
from saccade.models.sparo.pooling import PoolingOutput

PROBED_BLOCKS = 4  # whose class tokens a linear probe gets


class TowerFunction(nn.Module):
    """The function of a Sparo, folded or not; towers and poolings are the subclass's."""

    config: SparoConfig
    image: Any
    image_pool: Any
    text: Any
    text_pool: Any
    codebook: Any
    slot_mask: Tensor

    def encode_image(self, image: Tensor) -> PoolingOutput:
        """Return the code of an image and its parts.

        Shapes: image [b h w c], values 0 to 255 of any type.
        """
        codebook = self.codebook if self.config.pooling == "codebook" else None
        if self.config.first_tokens:
            tokens, classes = self.image.with_first(image)
        else:
            tokens, classes = self.image(image), ()
        pooled: PoolingOutput = self.image_pool(tokens, None, codebook)
        if classes and not self.training:
            pooled = pooled._replace(probe_features=self._probe_features(classes, pooled.raw))
        if not self.config.masked or pooled.slots is None:
            return pooled
        # Masks were trained on cosines, so the code gets length 1 again.
        code = F.normalize((pooled.slots * self.slot_mask).flatten(1), dim=-1)
        return pooled._replace(code=code, slots=code.unflatten(1, self.slot_mask.shape))

    def encode_text(self, tokens: Tensor) -> PoolingOutput:
        """Return the code of a text and its parts.

        Shapes: tokens [b context_length] int64.
        """
        query = self.codebook if self.config.pooling == "codebook" else None
        if self.config.share_queries:
            query = getattr(self.image_pool.read_out, "query", None)  # None if it is folded
        pooled: PoolingOutput = self.text_pool(self.text(tokens), self.text.end(tokens), query)
        return pooled

    def _probe_features(self, classes: Sequence[Tensor], raw: Tensor | None) -> Tensor:
        """Return the class tokens after the last four blocks, normalized by the norm of all tokens.

        Slots before their normalization take the place of the last one.

        Shapes: classes [b w], raw [b k v] -> [b f].
        Source: Vani et al. 2024, appendix C.2; DINO's linear probe (Caron et al. 2021).
        """
        norm = self.get_submodule(self.config.trunk_norm)
        count = PROBED_BLOCKS if raw is None else PROBED_BLOCKS - 1
        parts = [norm(token) for token in classes[-count:]]
        if raw is not None:
            # Of types with gates, a gate comes before the slot.
            parts.append(raw[..., -self.config.slot_dim :].flatten(1))
        return torch.cat(parts, 1)

    def components(self) -> tuple[Component, ...]:
        """Return the image tower and, if there is one, the text tower.

        Without a text tower, the image component answers requests alone and has no role.
        """
        config = self.config
        with_slots = config.pooling == "sparo"
        outputs = ("embedding", "slots") if with_slots else ("embedding",)
        optional = ("attention",) if with_slots else ()
        image = Component(
            role="image" if config.text else "",
            inputs=(image_spec(config),),
            outputs=outputs,
            run=lambda image: _named(self.encode_image(image)),
            optional=(*optional, PROBE_FEATURES) if config.first_tokens else optional,
            score=nearest_neighbour,
        )
        if not config.text:
            return (image,)
        text = Component(
            role="text",
            inputs=(TensorSpec("tokens", f"b {config.context_length}", "int64"),),
            outputs=outputs,
            run=lambda tokens: _named(self.encode_text(tokens)),
            optional=optional,
            random=lambda rng, count: {"tokens": random_tokens(config, rng, count)},
        )
        return image, text


def _named(pooled: PoolingOutput) -> dict[str, Tensor]:
    outputs = {"embedding": pooled.code}
    if pooled.slots is not None and pooled.attention is not None:
        outputs |= {"slots": pooled.slots, "attention": pooled.attention}
    if pooled.probe_features is not None:
        outputs[PROBE_FEATURES] = pooled.probe_features
    return outputs


def random_tokens(config: SparoConfig, rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw texts of random ids: start, words, end, then zeros.

    Shapes: -> [count context_length] int64.
    """
    n = config.context_length
    if config.tokenizer == "words":
        start, end, words = 1, config.end_token, (4, config.vocabulary)
    else:
        end = config.end_token or config.vocabulary - 1
        start, words = config.vocabulary - 2, (1, config.vocabulary - 2)
    ids = rng.integers(*words, (count, n)) if words[1] > words[0] else np.ones((count, n), int)
    ends = rng.integers(1, n, count)[:, None] if n > 1 else np.zeros((count, 1), int)
    place = np.arange(n)[None]
    ids = np.where(place < ends, ids, np.where(place == ends, end, 0))
    if n > 1:
        ids[:, 0] = start
    return ids.astype(np.int64)


def nearest_neighbour(outputs: Arrays, arrays: Mapping[str, np.ndarray]) -> float:
    """Return the share of images whose nearest other image, by cosine, has the same label.

    Without labels there is nothing to score, and the result is NaN.

    Shapes: outputs["embedding"] [n e], arrays["labels"] [n].
    """
    if "labels" not in arrays:
        return float("nan")
    codes = np.asarray(outputs["embedding"], np.float64)
    codes = codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)
    cosine = codes @ codes.T
    np.fill_diagonal(cosine, -np.inf)
    labels = np.asarray(arrays["labels"])
    return float(np.mean(labels[cosine.argmax(1)] == labels))
