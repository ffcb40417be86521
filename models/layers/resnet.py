# SPDX-License-Identifier: Apache-2.0
"""Residual networks with the names of torchvision."""

from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn

from saccade.models.config_values import ImageFields
from saccade.models.layers.pixels import PixelScale
from saccade.models.resnet_sizes import EXPANSION, ResNetSizes


class _Block(nn.Module):
    """Convolutions with batch norms, added to their input; `downsample` gives it their shape.

    The stride is that of the 3x3 convolution (ResNet V1.5), as in torchvision.
    """

    def __init__(self, before: int, width: int, stride: int, *, basic: bool) -> None:
        super().__init__()
        # Kernel size, channels and stride of each convolution.
        shapes = [(3, width, stride), (3, width, 1)]
        if not basic:
            shapes = [(1, width, 1), (3, width, stride), (1, EXPANSION * width, 1)]
        channels = before
        for place, (size, wide, step) in enumerate(shapes, start=1):
            self.add_module(f"conv{place}", _convolution(channels, wide, size, step))
            self.add_module(f"bn{place}", nn.BatchNorm2d(wide))
            channels = wide
        self.count = len(shapes)
        self.downsample: nn.Module | None = None
        if stride > 1 or before != channels:
            self.downsample = nn.Sequential(
                _convolution(before, channels, 1, stride), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for place in range(1, self.count + 1):
            y = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(y))
            y = y if place == self.count else torch.relu(y)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A residual network down to its grid of features; with `classes`, it also has their layer.

    Shapes: [b channels h w] -> [b width H W], one cell per 32 pixels, rounded up.
    Source: He et al. 2016 (Deep Residual Learning), table 1.
    """

    def __init__(self, sizes: ResNetSizes, *, channels: int = 3, classes: int = 0) -> None:
        super().__init__()
        before = sizes.widths[0]
        self.conv1 = _convolution(channels, before, 7, 2)
        self.bn1 = nn.BatchNorm2d(before)
        for stage, (width, count) in enumerate(zip(sizes.widths, sizes.blocks, strict=True)):
            blocks = []
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(_Block(before, width, stride, basic=sizes.basic))
                before = width * (1 if sizes.basic else EXPANSION)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.blocks = sizes.blocks
        self.fc = nn.Linear(before, classes) if classes else None
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        for stage in range(1, len(self.blocks) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def folded(self) -> "ResNet":
        """Return a copy for evaluation, each batch norm folded into its convolution."""
        copied = deepcopy(self).eval()
        for module in [copied, *copied.modules()]:
            _fold_norms(module)
        return copied.requires_grad_(False)


class ResNetCells(nn.Module):
    """The features of a ResNet's cells, row by row.

    Shapes: image [b h w c], values 0 to 255 of any type -> `content` [b (H W) width].
    """

    def __init__(self, config: ImageFields, sizes: ResNetSizes) -> None:
        super().__init__()
        # It only reads the image's size, mean and std.
        self.scale = PixelScale(config)
        self.resnet = ResNet(sizes, channels=config.channels)

    def content(self, image: Tensor) -> Tensor:
        """Return the cells' features, and nothing about their places."""
        return self.resnet(self.scale(image).permute(0, 3, 1, 2)).flatten(2).mT


def _convolution(before: int, width: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, width, size, stride, size // 2, bias=False)


def _fold_norms(module: nn.Module) -> None:
    """Fold each batch norm of a module's children into the convolution before it."""
    children = list(module.named_children())
    for (name, layer), (norm_name, norm) in pairwise(children):
        if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, nn.utils.fuse_conv_bn_eval(layer, norm))
            setattr(module, norm_name, nn.Identity())
