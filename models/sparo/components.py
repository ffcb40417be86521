# SPDX-License-Identifier: Apache-2.0
"""The components of a SPARO model: one for images, one for texts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.interface import Arrays, Component, TensorSpec
from saccade.models.sparo.config import SparoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from saccade.models.sparo.pooling import PoolingOutput

PROBE_FEATURES = "probe_features"  # those of DINO's linear probe


def components_of(model: Any) -> tuple[Component, ...]:
    """Return the components of a model with `config`, `encode_image` and `encode_text`.

    Without a text tower, the image component answers requests alone and has no role.
    """
    config: SparoConfig = model.config
    with_slots = config.pooling == "sparo"
    outputs = ("embedding", "slots") if with_slots else ("embedding",)
    optional = ("attention",) if with_slots else ()
    of_image = (*optional, PROBE_FEATURES) if config.first_tokens else optional
    image = Component(
        role="image" if config.text else "",
        inputs=(
            TensorSpec(
                "image", f"b {config.height_px} {config.width_px} {config.channels}", "uint8"
            ),
        ),
        outputs=outputs,
        run=lambda image: _named(model.encode_image(image)),
        optional=of_image,
        score=nearest_neighbour,
    )
    if not config.text:
        return (image,)
    text = Component(
        role="text",
        inputs=(TensorSpec("tokens", f"b {config.context_length}", "int64"),),
        outputs=outputs,
        run=lambda tokens: _named(model.encode_text(tokens)),
        optional=optional,
        random=lambda rng, count: {"tokens": random_tokens(config, rng, count)},
    )
    return image, text


def _named(pooled: "PoolingOutput") -> "dict[str, Tensor]":
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
