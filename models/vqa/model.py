# SPDX-License-Identifier: Apache-2.0
"""A network that answers questions about images, and shows where it looked."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.interface import Family
from saccade.models.layers.pixels import check_image
from saccade.models.layers.resnet import ResNetCells
from saccade.models.resnet_sizes import sizes_of
from saccade.models.vqa.components import Inputs, VQAFunction, given_rows
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.image_attention import GridPlaces
from saccade.models.vqa.mcan import (
    DecoderLayer,
    EncoderLayer,
    Norm,
    Pool,
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


class VQA(VQAFunction, Family):
    """An encoder of the question, a decoder of the image guided by the question, and a head.

    `details` takes the inputs of the configuration: question [b t] (0 pads), with image [b h w c]
    (values 0 to 255), or features (grid: [b H W c]; flat: [b rows c], whose first h w rows are the
    grid, row by row) with sizes [b 2], or boxes [b m c] with box_count [b], or the last four.

    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), section 3.2; Yu et al.
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

    def first_state(self, question: Tensor, weights: Tensor) -> Tensor:
        """Return the question's part of the answer's state."""
        return self.question_pool.merged(question, weights)

    def grid_states(
        self, inputs: Inputs, places: GridPlaces, question: Tensor, padding: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the states of the cells after the decoder, and which cells are masked."""
        if self.config.features == "image":
            # The cells of an image with several questions may be passed in, computed once.
            rows = inputs["cells"] if "cells" in inputs else self.cells(inputs["image"])
            masked = torch.zeros_like(rows[..., 0], dtype=torch.bool)
        else:
            rows, masked = given_rows(inputs["features"], places, question.dtype)
        x = self.grid_linear(rows)
        for layer in self.grid_decoder:
            x = layer(x, question, masked, padding)
        return x, masked

    def box_states(
        self, boxes: Tensor, masked: Tensor, question: Tensor, padding: Tensor
    ) -> Tensor:
        """Return the states of the boxes after the decoder."""
        x = self.box_linear(boxes)
        for layer in self.box_decoder:
            x = layer(x, question, masked, padding)
        return x

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
