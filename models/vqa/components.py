# SPDX-License-Identifier: Apache-2.0
"""The component of a question-answering network: its inputs and outputs."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from saccade.models.interface import Component, Invariant, TensorSpec
from saccade.models.layers.attention_invariants import no_excess, same_support, sums_to_one
from saccade.models.vqa.config import VQAConfig

_ZERO_ROW_SHARE = 0.05  # share of all-zero rows in random features


class DetailedVQA(Protocol):
    """A VQA or its folded form."""

    config: VQAConfig

    def details(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the named outputs of one pass."""
        ...


def vqa_component(model: DetailedVQA) -> Component:
    """Return the only component; its inputs are the image, its size, and the question."""
    config = model.config

    def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        return random_inputs(config, rng, count)

    outputs = ("logits", "probabilities", "attention")
    return Component(
        role="",
        inputs=input_specs(config),
        # The gate's TVMAX invariant needs it, so every file has it.
        outputs=(*outputs, "attention_excess") if _has_bound(config) else outputs,
        run=model.details,
        optional=("box_attention",) if config.image == "both" else (),
        random=random,
        invariants=_invariants(config),
    )


def _has_bound(config: VQAConfig) -> bool:
    return config.has_grid and config.attention == "tvmax" and config.solver == "exact"


def input_specs(config: VQAConfig) -> tuple[TensorSpec, ...]:
    """Return the inputs in their order: the image first, the question last."""
    height, width = config.grid
    specs = []
    if config.has_grid and config.features == "image":
        axes = f"b {config.height_px} {config.width_px} {config.channels}"
        specs.append(TensorSpec("image", axes, "uint8"))
    elif config.has_grid:
        places = f"{config.rows}" if config.layout == "flat" else f"{height} {width}"
        specs.append(TensorSpec("features", f"b {places} {config.feature_dim}", "float32"))
        specs.append(TensorSpec("sizes", "b 2", "int64"))
    if config.has_boxes:
        specs.append(TensorSpec("boxes", f"b {config.boxes} {config.box_dim}", "float32"))
        specs.append(TensorSpec("box_count", "b", "int64"))
    specs.append(TensorSpec("question", f"b {config.question_length}", "int64"))
    return tuple(specs)


def random_inputs(config: VQAConfig, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Draw grids, box counts and questions of all sizes, with some zero cells and noise outside."""
    inputs: dict[str, np.ndarray] = {}
    for spec in input_specs(config):
        shape = (count, *(int(axis) for axis in spec.shape[1:]))
        if spec.dtype == "uint8":
            inputs[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif spec.dtype == "float32":
            rows = rng.standard_normal(shape, dtype=np.float32)
            zero = rng.random((count, int(np.prod(shape[1:-1])))) < _ZERO_ROW_SHARE
            zero[:, 0] = False  # there is always something to see
            rows[zero.reshape(shape[:-1])] = 0
            inputs[spec.name] = rows
    if "features" in inputs:
        inputs["sizes"] = _random_sizes(config, rng, count)
    if "boxes" in inputs:
        inputs["box_count"] = rng.integers(1, config.boxes + 1, count)
    words = rng.integers(1, max(config.tokens, 2), (count, config.question_length))
    lengths = rng.integers(1, config.question_length + 1, (count, 1))
    inputs["question"] = np.where(np.arange(config.question_length) < lengths, words, 0)
    return inputs


def _random_sizes(config: VQAConfig, rng: np.random.Generator, count: int) -> np.ndarray:
    height = rng.integers(1, config.grid[0] + 1, count)
    width = rng.integers(1, config.grid[1] + 1, count)
    if config.layout == "flat":
        height = np.minimum(height, config.rows)
        width = np.minimum(width, config.rows // height)
    return np.stack([height, width], -1)


def _invariants(config: VQAConfig) -> Mapping[str, Invariant]:
    invariants: dict[str, Invariant] = {"attention_sums_to_one": sums_to_one}
    if (config.attention if config.has_grid else config.box_attention) != "softmax":
        invariants["attention_support"] = same_support
    if _has_bound(config):
        invariants["tvmax_bound"] = no_excess
    return invariants
