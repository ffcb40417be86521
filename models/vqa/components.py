# SPDX-License-Identifier: Apache-2.0
"""The function of a question-answering network, and its component: inputs and outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError
from saccade.models.interface import Component, Invariant, TensorSpec, image_spec
from saccade.models.layers.attention_invariants import no_excess, same_support, sums_to_one
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.image_attention import GridPlaces, check_sizes, grid_attention
from saccade.models.vqa.mcan import attention_weights

_ZERO_ROW_SHARE = 0.05  # share of all-zero rows in random features


Inputs = Mapping[str, Tensor]


class VQAFunction(nn.Module, ABC):
    """The function of a VQA, folded or not; its decoders are the subclass's."""

    config: VQAConfig
    embedding: nn.Module
    lstm: nn.Module
    encoder: nn.ModuleList
    question_pool: Any
    grid_pool: Any
    box_pool: Any
    norm: Any
    head: Any

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits; inputs as in `details`.

        Shapes: -> [b answers].
        """
        return self.details(**inputs)["logits"]

    def details(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return all outputs of one pass.

        Shapes: -> logits, probabilities [b answers]; attention [b H W] (only boxes: [b m]); with
                both also box_attention [b m]; with exact TVMAX also attention_excess [b], 0
                if its error is within the tolerance.
        """
        config = self.config
        details: dict[str, Tensor] = {}
        check_question(inputs["question"], config)
        padding = inputs["question"] == 0
        x = self.lstm(self.embedding(inputs["question"]))[0]
        for layer in self.encoder:
            x = layer(x, padding)
        state = self.first_state(x, self.question_pool.scores(x, padding).softmax(-1))
        if config.has_grid:
            places = grid_places(inputs, config)
            y, masked = self.grid_states(inputs, places, x, padding)
            scores = self.grid_pool.scores(y, masked)
            weights, details["attention"], excess = grid_attention(scores, places, config)
            if excess is not None:
                details["attention_excess"] = excess
            state = state + self.grid_pool.merged(y, weights)
        if config.has_boxes:
            boxes, masked = given_boxes(inputs, x.dtype)
            y = self.box_states(boxes, masked, x, padding)
            weights = attention_weights(self.box_pool.scores(y, masked), config.box_attention)
            details["box_attention" if config.has_grid else "attention"] = weights
            state = state + self.box_pool.merged(y, weights)
        logits = self.head(self.norm(state))
        probabilities = logits.sigmoid() if config.answer == "sigmoid" else logits.softmax(-1)
        return {"logits": logits, "probabilities": probabilities, **details}

    @abstractmethod
    def first_state(self, question: Tensor, weights: Tensor) -> Tensor:
        """Return the question's part of the answer's state.

        Shapes: question [b t d], weights [b t] -> [b pool_dim].
        """

    @abstractmethod
    def grid_states(
        self, inputs: Inputs, places: GridPlaces, question: Tensor, padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the cells after the decoder, and which cells are masked.

        Shapes: question [b t d], padding [b t] bool -> [b n d], [b n] bool.
        """

    @abstractmethod
    def box_states(
        self, boxes: Tensor, masked: Tensor, question: Tensor, padding: Tensor
    ) -> Tensor:
        """Return the states of the boxes after the decoder.

        Shapes: boxes [b m c], masked [b m] bool, question [b t d], padding [b t] -> [b m d].
        """

    def components(self) -> tuple[Component, ...]:
        """Return the only component: from question and image to the answer."""
        return (_component(self),)


def grid_places(inputs: Inputs, config: VQAConfig) -> GridPlaces:
    """Return the positions of each sample's cells; pixels always fill the whole grid.

    Raises: SaccadeError if a size does not fit this model.
    """
    if config.features == "image":
        return GridPlaces(config, None)
    check_sizes(inputs["sizes"], config)
    return GridPlaces(config, inputs["sizes"])


def given_rows(features: Tensor, places: GridPlaces, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return features as rows, and the masked rows: those outside a grid and all-zero ones.

    Shapes: features [b H W c] or [b n c] -> [b n c], [b n] bool.
    """
    rows = features.to(dtype)
    if rows.dim() == 4:
        rows = rows.flatten(1, 2)
    outside = places.outside_rows()
    if outside is not None:
        # Any value there, such as NaN, would come back as 0 x NaN.
        rows = rows.masked_fill(outside[..., None], 0)
    return rows, rows.abs().sum(-1) == 0


def given_boxes(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return boxes, and the masked ones: those beyond an image's count, and all-zero ones.

    Shapes: boxes [b m c], box_count [b] -> [b m c], [b m] bool.
    Raises: SaccadeError if an image has no box, or more than there are rows.
    """
    boxes, count = inputs["boxes"].to(dtype), inputs["box_count"]
    most = boxes.shape[1]
    if not torch.compiler.is_compiling() and bool(((count < 1) | (count > most)).any()):
        raise SaccadeError(
            f"box_count: found {count.tolist()}, expected 1 to {most} boxes in each image. "
            "Leave out images without boxes."
        )
    padding = torch.arange(most, device=boxes.device) >= count[:, None]
    boxes = boxes.masked_fill(padding[..., None], 0)
    return boxes, boxes.abs().sum(-1) == 0


def check_question(question: Tensor, config: VQAConfig) -> None:
    """Check that all ids are in the vocabulary; traced graphs skip the check.

    Raises: SaccadeError if one is not.
    """
    if torch.compiler.is_compiling() or question.numel() == 0:
        return
    low, high = int(question.min()), int(question.max())
    if low < 0 or high >= config.tokens:
        raise SaccadeError(
            f"question: found token ids from {low} to {high}, expected 0 to {config.tokens - 1}. "
            "Use the vocabulary of this model."
        )


def _component(model: VQAFunction) -> Component:
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
        specs.append(image_spec(config))
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
