# SPDX-License-Identifier: Apache-2.0
"""A network that answers questions about images, and shows where it looked."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.interface import Component, Family
from saccade.models.layers.pixels import check_image
from saccade.models.layers.resnet import ResNetCells
from saccade.models.resnet_sizes import sizes_of
from saccade.models.vqa.components import vqa_component
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.image_attention import GridPlaces, check_sizes, grid_attention
from saccade.models.vqa.mcan import (
    DecoderLayer,
    EncoderLayer,
    Norm,
    Pool,
    attention_weights,
)

_GROUPS, _POSITION_STD = 4, 0.02


class ImageCells(nn.Module):
    """Convolutions down to the grid, each stride followed by one of stride 1, plus positions.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b (H W) feature_dim].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: VQAConfig) -> None:
        super().__init__()
        self.size = (config.height_px, config.width_px, config.channels)
        self.register_buffer("mean", torch.tensor(config.mean), persistent=False)
        self.register_buffer("std", torch.tensor(config.std), persistent=False)
        layers: list[nn.Conv2d] = []
        before = config.channels
        for stride, width in zip(config.strides, _widths(config), strict=True):
            layers.append(
                nn.Conv2d(before, width, 5 if not layers else 3, stride, 2 - bool(layers))
            )
            layers.append(nn.Conv2d(width, width, 3, padding=1))
            before = width
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, layer.out_channels) for layer in layers)
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        cells = config.grid[0] * config.grid[1]
        self.position = nn.Parameter(_POSITION_STD * torch.randn(cells, config.feature_dim))

    def forward(self, image: Tensor) -> Tensor:
        return self.content(image) + self.position

    def content(self, image: Tensor) -> Tensor:
        """Return the cells without their positions."""
        check_image(image, self.size)
        x = ((image.to(self.mean.dtype) / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x.flatten(2).mT


class PlacedCells(ResNetCells):
    """The features of a ResNet's cells, plus positions.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b (H W) feature_dim].
    """

    def __init__(self, config: VQAConfig) -> None:
        super().__init__(config, sizes_of(config.encoder))
        cells = config.grid[0] * config.grid[1]
        self.position = nn.Parameter(_POSITION_STD * torch.randn(cells, config.feature_dim))

    def forward(self, image: Tensor) -> Tensor:
        return self.content(image) + self.position


def _widths(config: VQAConfig) -> list[int]:
    """Return the channels, which double with each stride up to a cell's, in whole groups."""
    last = len(config.strides) - 1
    return [
        config.feature_dim
        if step == last
        else max(2 * _GROUPS, (config.feature_dim >> (last - step)) // _GROUPS * _GROUPS)
        for step in range(last + 1)
    ]


class VQA(nn.Module, Family):
    """An encoder of the question, a decoder of the image guided by the question, and a head.

    `details` takes the inputs of the configuration: question [b t] (0 pads), with image [b h w c]
    (values 0 to 255), or features (grid: [b H W c]; flat: [b rows c], whose first h w rows are the
    grid, row by row) with sizes [b 2], or boxes [b m c] with box_count [b], or the last four.

    Source: Martins et al. 2020 (Sparse and Structured Visual Attention), section 3.2; Yu et al.
            2019 (Deep Modular Co-Attention Networks), the encoder-decoder form.
    """

    config_class = VQAConfig
    repeated_blocks = (EncoderLayer, DecoderLayer)

    def __init__(self, config: VQAConfig, *, fresh: bool = True) -> None:
        """Draw the weights from config.seed; if `fresh` is false, they will be loaded."""
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._build(config)

    def _build(self, config: VQAConfig) -> None:
        self.embedding = nn.Embedding(config.tokens, config.word_dim)
        self.lstm = nn.LSTM(config.word_dim, config.dim, batch_first=True)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.question_pool = Pool(config)
        if config.has_grid:
            if config.features == "image":
                small = config.encoder == "cells"
                self.cells = ImageCells(config) if small else PlacedCells(config)
            self.grid_linear = nn.Linear(config.feature_dim, config.dim)
            self.grid_decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
            self.grid_pool = Pool(config)
        if config.has_boxes:
            self.box_linear = nn.Linear(config.box_dim, config.dim)
            self.box_decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
            self.box_pool = Pool(config)
        self.norm = Norm(config.pool_dim, config.norm, config.eps)
        self.head = nn.Linear(config.pool_dim, config.answers)

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
        question, masked = self.read(inputs["question"])
        weights = self.question_pool.scores(question, masked).softmax(-1)
        state = self.question_pool.merged(question, weights)
        details: dict[str, Tensor] = {}
        if self.config.has_grid:
            state = state + self._look_at_grid(inputs, question, masked, details)
        if self.config.has_boxes:
            state = state + self._look_at_boxes(inputs, question, masked, details)
        return answered(self.head(self.norm(state)), details, self.config)

    def read(self, question: Tensor) -> tuple[Tensor, Tensor]:
        """Encode the question's words in context, and mark the padding.

        Shapes: question [b t] int64 -> [b t d], [b t] bool.
        """
        check_question(question, self.config)
        masked = question == 0
        x = self.lstm(self.embedding(question))[0]
        for layer in self.encoder:
            x = layer(x, masked)
        return x, masked

    def _look_at_grid(
        self,
        inputs: dict[str, Tensor],
        question: Tensor,
        question_masked: Tensor,
        details: dict[str, Tensor],
    ) -> Tensor:
        config = self.config
        places = grid_places(inputs, config)
        if config.features == "image":
            # The cells of an image with several questions may be passed in, computed once.
            rows = inputs["cells"] if "cells" in inputs else self.cells(inputs["image"])
            masked = torch.zeros_like(rows[..., 0], dtype=torch.bool)
        else:
            rows, masked = given_rows(inputs["features"], places, self.grid_linear.weight.dtype)
        x = self.grid_linear(rows)
        for layer in self.grid_decoder:
            x = layer(x, question, masked, question_masked)
        weights, attention, excess = grid_attention(
            self.grid_pool.scores(x, masked), places, config
        )
        details["attention"] = attention
        if excess is not None:
            details["attention_excess"] = excess
        return self.grid_pool.merged(x, weights)

    def _look_at_boxes(
        self,
        inputs: dict[str, Tensor],
        question: Tensor,
        question_masked: Tensor,
        details: dict[str, Tensor],
    ) -> Tensor:
        boxes, masked = given_boxes(inputs, self.box_linear.weight.dtype)
        x = self.box_linear(boxes)
        for layer in self.box_decoder:
            x = layer(x, question, masked, question_masked)
        kind = self.config.box_attention
        weights = attention_weights(self.box_pool.scores(x, masked), kind)
        details["box_attention" if self.config.has_grid else "attention"] = weights
        return self.box_pool.merged(x, weights)

    def components(self) -> tuple[Component, ...]:
        """Return the only component: from question and image to the answer."""
        return (vqa_component(self),)

    def runtime_metadata(self) -> dict[str, Any]:
        """Return the runtime metadata: how questions become tokens, and the kind of image."""
        config = self.config
        return {
            "words": list(config.words),
            "vocabulary": config.vocabulary,
            "tokens": config.tokens,
            "question_length": config.question_length,
            "grid": list(config.grid) if config.has_grid else None,
            "boxes": config.boxes if config.has_boxes else 0,
            "features": config.features,
            "layout": config.layout,
            "attention": config.attention if config.has_grid else config.box_attention,
        }


def answered(logits: Tensor, details: dict[str, Tensor], config: VQAConfig) -> dict[str, Tensor]:
    """Return the outputs of one pass, with the configured probabilities."""
    probabilities = logits.sigmoid() if config.answer == "sigmoid" else logits.softmax(-1)
    return {"logits": logits, "probabilities": probabilities, **details}


def grid_places(inputs: dict[str, Tensor], config: VQAConfig) -> GridPlaces:
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


def given_boxes(inputs: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
