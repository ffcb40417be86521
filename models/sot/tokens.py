# SPDX-License-Identifier: Apache-2.0
"""Image to word tokens: a linear layer per patch, or a stem and three convolution blocks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.vit import PatchTokens
from saccade.models.sot.config import SoTConfig

STEM = 64  # channels of the stem and of the blocks' bottlenecks
GROWTH, DENSE_LAYERS = 16, 6
# Used in the authors' ResNet and Inception blocks, and before a non-local block.
WIDE_EPSILON = 1e-3


class ConvNorm(nn.Module):
    """A convolution and its batch norm, which `fold` folds into the convolution.

    Shapes: x [b c h w] -> [b c' h' w'].
    """

    def __init__(
        self,
        source: int,
        target: int,
        side: int = 1,
        *,
        stride: int = 1,
        bias: bool = False,
        eps: float = WIDE_EPSILON,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(source, target, side, stride, side // 2, bias=bias)
        self.norm: nn.Module = nn.BatchNorm2d(target, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class DenseLayer(nn.Module):
    """ReLU, 1x1 convolution, ReLU, 3x3 convolution; with `norm`, a batch norm before each ReLU.

    Shapes: x [b c h w] -> GROWTH further channels [b 16 h w].
    """

    def __init__(self, channels: int, *, norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.narrow: nn.Module = nn.Conv2d(channels, 2 * GROWTH, 1, bias=False)
        if norm:
            self.narrow = ConvNorm(channels, 2 * GROWTH, eps=1e-5)
        self.grow = nn.Conv2d(2 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.grow(F.relu(self.narrow(F.relu(self.norm(x)))))


class DenseBlock(nn.Module):
    """Six dense layers, each reading all previous ones; batch norm, 1x1 convolution, halving.

    Shapes: x [b c h w] -> [b 128 h/2 w/2], or [b 128 h w] if it does not halve.
    """

    def __init__(self, channels: int, *, halve: bool, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels + index * GROWTH, norm=norm) for index in range(DENSE_LAYERS)
        )
        channels += DENSE_LAYERS * GROWTH
        self.norm: nn.Module = nn.BatchNorm2d(channels)
        self.narrow = nn.Conv2d(channels, 2 * STEM, 1, bias=False)
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat((x, layer(x)), 1)
        x = self.narrow(self.norm(x))
        return F.avg_pool2d(x, 2) if self.halve else x


class ResNetBlock(nn.Module):
    """A bottleneck of three convolutions, plus a shortcut.

    Shapes: x [b c h w] -> [b 256 h/2 w/2], or [b 256 h w] if it does not halve.
    """

    def __init__(self, channels: int, *, halve: bool) -> None:
        super().__init__()
        stride, wide = 2 if halve else 1, 4 * STEM
        self.first = ConvNorm(channels, STEM)
        self.second = ConvNorm(STEM, STEM, 3, stride=stride)
        self.third = ConvNorm(STEM, wide)
        self.shortcut: nn.Module = nn.Identity()
        if halve or channels != wide:
            self.shortcut = ConvNorm(channels, wide, stride=stride, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.third(F.relu(self.second(F.relu(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


class InceptionBlock(nn.Module):
    """Four parallel paths: 1x1, 3x3, 5x5, and a maximum.

    Shapes: x [b c h w] -> [b 128 h/2 w/2], or [b 128 h w] if it does not halve.
    """

    def __init__(self, channels: int, *, halve: bool) -> None:
        super().__init__()
        self.stride = 2 if halve else 1
        self.one = ConvNorm(channels, 32, stride=self.stride)
        self.three_narrow = ConvNorm(channels, 32)
        self.three = ConvNorm(32, 64, 3, stride=self.stride)
        self.five_narrow = ConvNorm(channels, 16)
        self.five = ConvNorm(16, 16, 5, stride=self.stride)
        self.largest = ConvNorm(channels, 16)

    def forward(self, x: Tensor) -> Tensor:
        three = self.three(F.relu(self.three_narrow(x)))
        five = self.five(F.relu(self.five_narrow(x)))
        largest = self.largest(F.max_pool2d(x, 3, self.stride, 1))
        return F.relu(torch.cat((self.one(x), three, five, largest), 1))


class NonLocalBlock(nn.Module):
    """A halving convolution, then attention of each position to all, plus a shortcut.

    Shapes: x [b c h w] -> [b c' h/2 w/2].
    """

    def __init__(self, channels: int, target: int) -> None:
        super().__init__()
        self.halve = ConvNorm(channels, STEM, 3, stride=2, bias=True)
        self.query, self.key, self.value = (
            ConvNorm(STEM, STEM, bias=True, eps=1e-5) for _ in range(3)
        )
        self.widen = nn.Conv2d(STEM, target, 1)
        self.shortcut = ConvNorm(STEM, target, bias=True, eps=1e-5)
        self.norm: nn.Module = nn.BatchNorm2d(target)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.halve(x))
        query, key, value = (
            projection(x).flatten(2) for projection in (self.query, self.key, self.value)
        )
        attended = (value @ (query.mT @ key).softmax(-1).mT).reshape(x.shape)
        return self.norm(self.widen(attended) + self.shortcut(x))


class ConvolutionTokens(nn.Module):
    """A stem that halves twice, further halving blocks, and a 1x1 convolution to the trunk's width.

    Shapes: pixels [b c h w] -> [b n dim], rows of tokens from the top left.
    Source: Xie et al. 2021, supplement A and figure S-1.
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(config.channels, STEM, 3, padding=1)
        self.blocks = nn.ModuleList(_blocks(config))
        channels = 4 * STEM if config.token_embedding in ("resnet", "non-local") else 2 * STEM
        self.project = nn.Conv2d(channels, config.dim, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(pixels), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.project(x).flatten(2).mT


def _blocks(config: SoTConfig) -> list[nn.Module]:
    kind, last = config.token_embedding, config.patch_px == 16
    if kind == "non-local":
        return [NonLocalBlock(STEM, 2 * STEM), NonLocalBlock(2 * STEM, 4 * STEM)]
    halves = (True, True, last)
    if kind == "densenet":
        widths = (STEM, 2 * STEM, 2 * STEM)
        return [
            DenseBlock(width, halve=halve, norm=config.dense_norm)
            for width, halve in zip(widths, halves, strict=True)
        ]
    if kind == "resnet":
        widths = (STEM, 4 * STEM, 4 * STEM)
        return [ResNetBlock(w, halve=half) for w, half in zip(widths, halves, strict=True)]
    widths = (STEM, 2 * STEM, 2 * STEM)
    return [InceptionBlock(w, halve=half) for w, half in zip(widths, halves, strict=True)]


def token_embedding(config: SoTConfig) -> PatchTokens | ConvolutionTokens:
    """Create the embedding that the configuration names."""
    naive = config.token_embedding == "naive"
    return PatchTokens(config.shape) if naive else ConvolutionTokens(config)
