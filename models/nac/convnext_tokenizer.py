# SPDX-License-Identifier: Apache-2.0
"""Images to tokens by the first stages of a ConvNeXt, with learned positions behind or on them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.pixels import PixelScale
from saccade.models.nac.config import NACConfig
from saccade.models.nac.modulation import linear
from saccade.models.nac.sequence_tokenizers import POSITION_STD

EPSILON = 1e-6  # of the LayerNorms inside
_GAMMA = 1e-6  # at the start


class ConvNeXtTokenizer(nn.Module):
    """Pixels scaled, the stages, positions, LayerNorm.

    The positions are channels of their own behind the features (`positions: concat`), added to
    them (learned), or absent (none).

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n tokens_width], row by row.
    Source: Liu et al. 2022 (arXiv 2201.03545); positions as in the NAC authors' code.
    """

    position: nn.Parameter | None

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.scale = PixelScale(config)
        inputs = (config.channels, *config.convnext_widths)
        self.stages = nn.ModuleList(
            Stage(inputs[index], width, blocks, first=index == 0)
            for index, (width, blocks) in enumerate(
                zip(config.convnext_widths, config.convnext_blocks, strict=True)
            )
        )
        self.concat = config.positions == "concat"
        own = config.tokens_width - (config.convnext_widths[-1] if self.concat else 0)
        position = POSITION_STD * torch.randn(config.tokens or 1, own)
        absent = config.positions == "none"
        self.register_parameter("position", None if absent else nn.Parameter(position))
        self.norm = nn.LayerNorm(config.tokens_width)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        return self.norm(self.placed(self.scale(image)))

    def placed(self, pixels: Tensor) -> Tensor:
        """Features of scaled pixels with their positions, in front of the LayerNorm.

        Shapes: pixels [b h w c] -> [b n tokens_width].
        """
        x = pixels.permute(0, 3, 1, 2)
        for stage in self.stages:
            x = stage(x)
        tokens = x.flatten(2).mT
        if self.position is None:
            return tokens
        if self.concat:
            return torch.cat((tokens, self.position.expand(tokens.shape[0], -1, -1)), -1)
        return tokens + self.position


class Stage(nn.Module):
    """Squares of 4 x 4 pixels (the first stage) or 2 x 2 cells to one cell, then blocks.

    Shapes: x [b inputs h w] -> [b outputs h' w'].
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, *, first: bool) -> None:
        super().__init__()
        side = 4 if first else 2
        self.norm = ChannelNorm(outputs if first else inputs)
        self.merge = nn.Conv2d(inputs, outputs, side, stride=side)
        self.blocks = nn.Sequential(*(Block(outputs) for _ in range(blocks)))
        self.first = first
        nn.init.trunc_normal_(self.merge.weight, std=0.02)
        nn.init.zeros_(self.merge.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        merged = self.norm(self.merge(x)) if self.first else self.merge(self.norm(x))
        return self.blocks(merged)


class Block(nn.Module):
    """x + gamma * narrow(gelu(widen(LayerNorm(depthwise 7 x 7 convolution of x)))).

    Shapes: x [b c h w] -> same.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=EPSILON)
        self.widen = linear(channels, 4 * channels)
        self.narrow = linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), _GAMMA))
        nn.init.trunc_normal_(self.depthwise.weight, std=0.02)
        nn.init.zeros_(self.depthwise.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(F.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of every cell.

    Shapes: x [b c h w] -> same.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
