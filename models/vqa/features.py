# SPDX-License-Identifier: Apache-2.0
"""From pixels to the cells of a grid: the encoder of small models."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.pixels import check_image
from saccade.models.vqa.config import VQAConfig

_GROUPS, _POSITION_STD = 4, 0.02


class ImageCells(nn.Module):
    """Convolutions down to the grid, each step down followed by one that stays; a position.

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
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, each.out_channels) for each in layers)
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
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


def _widths(config: VQAConfig) -> list[int]:
    """Channels double with each step down to those of a cell; all in whole groups."""
    last = len(config.strides) - 1
    return [
        config.feature_dim
        if step == last
        else max(2 * _GROUPS, (config.feature_dim >> (last - step)) // _GROUPS * _GROUPS)
        for step in range(last + 1)
    ]
