# SPDX-License-Identifier: Apache-2.0
"""Encoders from pixels to the tokens that slots compete for, with their grid positions."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.rounds import linear, scaled_normal_

GROUPS = 32  # of GroupNorm


class SameConv(nn.Module):
    """A convolution with ceil(size / stride) output cells; odd padding goes to the end.

    Shapes: [b c h w] -> [b outputs h' w'].
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, bias=bias)
        scaled_normal_(self.conv.weight, inputs * kernel**2)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self._pad(int(size)) for size in x.shape[-2:])
        return self.conv(F.pad(x, (*columns, *rows)))

    def _pad(self, size: int) -> tuple[int, int]:
        cells = -(-size // self.stride)
        total = max((cells - 1) * self.stride + self.kernel - size, 0)
        return total // 2, total - total // 2


class SimpleCNN(nn.Module):
    """Convolutions with ReLU between them, but not after the last.

    Shapes: [b c h w] -> [b channels h' w'].
    Source: Biza et al. 2022, tables 5 and 6.
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        inputs = (config.channels, *config.encoder_channels[:-1])
        layers = zip(
            inputs,
            config.encoder_channels,
            config.encoder_kernels,
            config.encoder_strides,
            strict=True,
        )
        self.layers = nn.ModuleList(SameConv(*layer) for layer in layers)
        self.stride = math.prod(config.encoder_strides)
        self.outputs = config.encoder_channels[-1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, plus a shortcut.

    Shapes: [b c h w] -> [b outputs h' w'].
    """

    def __init__(self, inputs: int, outputs: int, stride: int, eps: float) -> None:
        super().__init__()
        self.first = SameConv(inputs, outputs, 3, stride, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, outputs, eps)
        self.second = SameConv(outputs, outputs, 3, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, outputs, eps)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = SameConv(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.GroupNorm(GROUPS, outputs, eps))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(self.first(x)).relu()
        return (self.second_norm(self.second(y)) + self.shortcut(x)).relu()


class SmallResNet(nn.Module):
    """A ResNet for small inputs: stride 1 and no pooling at the root, no ReLU after its norm.

    Shapes: [b c h w] -> [b channels h' w'], h' = ceil(h / 2 ** (stages - 1)).
    Source: Biza et al. 2022, appendix G; He et al. 2016 for the blocks.
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        width, eps = config.resnet_width, config.norm_epsilon
        self.root = SameConv(config.channels, width, 3, bias=False)
        self.root_norm = nn.GroupNorm(GROUPS, width, eps)
        blocks, inputs = [], width
        for stage, count in enumerate(config.resnet_stages):
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(ResidualBlock(inputs, width * 2**stage, stride, eps))
                inputs = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.stride = 2 ** (len(config.resnet_stages) - 1)
        self.outputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.root_norm(self.root(x)))


class GridEmbedding(nn.Module):
    """The position of each token: appended as (y, x), or added through a linear layer.

    As in the authors' code, the grid is stored with the weights.

    Shapes: [b h w c] -> tokens [b h*w c'], c' = c + 2 if the grid is appended.
    """

    grid: Tensor

    def __init__(self, config: SlotConfig, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("grid", coordinates(height, width))
        self.project: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if config.grid_embedding == "project_add":
            self.project = linear(2, dim)
        if self.project is not None and config.grid_embedding_mlp:
            self.mlp = nn.Sequential(
                nn.LayerNorm(dim, eps=config.norm_epsilon),
                linear(dim, config.grid_embedding_mlp),
                nn.ReLU(),
                linear(config.grid_embedding_mlp, dim),
            )
        self.outputs = dim if self.project is not None else dim + 2

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid.expand(x.shape[0], -1, -1, -1)
        x = torch.cat([x, grid], -1) if self.project is None else x + self.project(self.grid)
        x = x if self.mlp is None else self.mlp(x)
        return x.flatten(1, 2)


class Encoder(nn.Module):
    """The encoder: pixels to tokens.

    Shapes: pixels [b h w c], normalized -> tokens [b n c'].
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        trunk = SimpleCNN if config.encoder == "simple-cnn" else SmallResNet
        self.trunk = trunk(config)
        cells = (-(-side // self.trunk.stride) for side in (config.height_px, config.width_px))
        self.height, self.width = cells
        self.embedding = GridEmbedding(config, self.height, self.width, self.trunk.outputs)
        self.outputs = self.embedding.outputs

    def forward(self, pixels: Tensor) -> Tensor:
        return self.embedding(self.trunk(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def coordinates(height: int, width: int) -> Tensor:
    """Return (y, x) of every cell, from -1 to 1 inclusive; a single cell is at -1.

    Shapes: -> [1 h w 2].
    """
    rows, columns = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)[None]
