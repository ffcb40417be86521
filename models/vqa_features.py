# SPDX-License-Identifier: Apache-2.0
"""From pixels to the cells of a grid: the encoder of small models."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.tokenizers import check_image
from saccade.models.vqa_config import VQAConfig

_GROUPS, _POSITION_STD = 4, 0.02


class ImageCells(nn.Module):
    """Convolutions that halve the side until the grid is left, one more, and a learned position.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b (H W) feature_dim].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: VQAConfig) -> None:
        super().__init__()
        self.size = (config.height_px, config.width_px, config.channels)
        self.register_buffer("mean", torch.tensor(config.mean), persistent=False)
        self.register_buffer("std", torch.tensor(config.std), persistent=False)
        halvings = round(math.log2(config.height_px // config.grid[0]))
        widths = [_width(config.feature_dim, halvings - 1 - step) for step in range(halvings)]
        steps = list(zip([config.channels, *widths], [*widths, config.feature_dim], strict=True))
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 5 if i == 0 else 3, 2 if i < halvings else 1, 2 if i == 0 else 1)
            for i, (before, after) in enumerate(steps)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, after) for _, after in steps)
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        cells = config.grid[0] * config.grid[1]
        self.position = nn.Parameter(_POSITION_STD * torch.randn(cells, config.feature_dim))

    def forward(self, image: Tensor) -> Tensor:
        return self.content(image) + self.position

    def content(self, image: Tensor) -> Tensor:
        """The cells without their position."""
        check_image(image, self.size)
        x = ((image.to(self.mean.dtype) / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x.flatten(2).mT


def _width(channels: int, halvings_left: int) -> int:
    """Half the channels for each halving that is still to come, in whole groups."""
    return max(2 * _GROUPS, (channels >> halvings_left) // _GROUPS * _GROUPS)
