# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: from any input to tokens of the model's width, with their positions."""

from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import ShapeError
from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.trunk import trunk_of
from saccade.models.nac.config import NACConfig
from saccade.models.nac.modulation import linear
from saccade.models.nac.sequence_tokenizers import POSITION_STD, sequence_tokenizer
from saccade.models.trunks import Kind

EPSILON = 1e-6  # of the inner LayerNorms
_GAMMA = 1e-6  # initial value


class ConvNeXtTokenizer(nn.Module):
    """Scaled pixels, the stages of a ConvNeXt, positions, LayerNorm.

    Positions are separate channels after the features (`positions: concat`), added to the features
    (learned), or absent (none).

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
        position_width = config.tokens_width - (config.convnext_widths[-1] if self.concat else 0)
        position = POSITION_STD * torch.randn(config.tokens or 1, position_width)
        absent = config.positions == "none"
        self.register_parameter("position", None if absent else nn.Parameter(position))
        self.norm = nn.LayerNorm(config.tokens_width)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        return self.norm(self.placed(self.scale(image)))

    def placed(self, pixels: Tensor) -> Tensor:
        """Return the features of scaled pixels with their positions, before the LayerNorm.

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
    """Merges 4 x 4 pixels (first stage) or 2 x 2 cells into one cell, then blocks.

    Shapes: x [b inputs h w] -> [b outputs h' w'].
    """

    def __init__(self, inputs: int, outputs: int, blocks: int, *, first: bool) -> None:
        super().__init__()
        side = 4 if first else 2
        self.norm = ChannelNorm(outputs if first else inputs)
        self.merge = nn.Conv2d(inputs, outputs, side, stride=side)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(outputs) for _ in range(blocks)))
        self.first = first
        nn.init.trunc_normal_(self.merge.weight, std=0.02)
        nn.init.zeros_(self.merge.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        merged = self.norm(self.merge(x)) if self.first else self.merge(self.norm(x))
        return self.blocks(merged)


class ConvNeXtBlock(nn.Module):
    """A block: x + gamma * narrow(gelu(widen(LayerNorm(depthwise 7 x 7 convolution of x)))).

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


class PatchTokenizer(nn.Module):
    """Pixels scaled to mean 0 and std 1, one linear layer per patch, positions, LayerNorm.

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n dim], rows of patches
            from the top left.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = PixelScale(config)
        self.project = linear(config.patch_px**2 * config.channels, config.tokens_width)
        self.position = nn.Parameter(
            POSITION_STD * torch.randn(config.tokens or 1, config.tokens_width)
        )
        self.norm = nn.LayerNorm(config.tokens_width)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        pixels = self.scale(image)
        return self.norm(self.project(patches(pixels, self.config.patch_px)) + self.position)


class ConvTokenizer(nn.Module):
    """Two 3x3 convolutions and one of the size of a patch, positions, LayerNorm.

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n dim].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        dim = config.tokens_width
        width = max(8, dim // 2)
        self.scale = PixelScale(config)
        self.first = nn.Conv2d(config.channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.project = nn.Conv2d(
            width, config.tokens_width, config.patch_px, stride=config.patch_px
        )
        for layer in (self.first, self.second, self.project):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.position = nn.Parameter(
            POSITION_STD * torch.randn(config.tokens or 1, config.tokens_width)
        )
        self.norm = nn.LayerNorm(config.tokens_width)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        pixels = self.scale(image).permute(0, 3, 1, 2)
        features = F.gelu(self.second(F.gelu(self.first(pixels))))
        return self.norm(self.project(features).flatten(2).mT + self.position)


def patches(pixels: Tensor, side_px: int) -> Tensor:
    """Return non-overlapping squares of pixels, each as one vector (row, column, channel).

    Shapes: pixels [b h w c] -> [b (h w / side^2) (side side c)].
    """
    b, h, w, c = pixels.shape
    rows, columns = h // side_px, w // side_px
    grid = pixels.reshape(b, rows, side_px, columns, side_px, c).permute(0, 1, 3, 2, 4, 5)
    return grid.reshape(b, rows * columns, side_px * side_px * c)


class TrunkTokenizer(nn.Module):
    """The patches of a ViT or Swin after its last norm, or the cells of a ResNet.

    Positions are the trunk's own; a ResNet has none.

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n tokens_width], row by row.
    Source: Weiss et al. 2022, section 4.4: a pretrained backbone preprocesses the images.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        assert config.trunk is not None
        self.trunk = trunk_of(config.trunk)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        words: Tensor = self.trunk(image).words
        return words


class PairTokenizer(nn.Module):
    """One tokenizer for both inputs of a pair; a learned vector marks each token's input.

    Shapes: x [b 2 ...], each half as in `each`, length [b 2]
            -> tokens [b 2n dim], the first input's first.
    """

    def __init__(self, tokenizer: nn.Module, config: NACConfig) -> None:
        super().__init__()
        self.each = tokenizer
        self.mark = nn.Parameter(
            POSITION_STD * torch.randn(config.input_sets, 1, config.tokens_width)
        )

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        sets = self.mark.shape[0]
        if x.dim() < 3 or x.shape[1] != sets:
            raise ShapeError(
                f"input: found shape {list(x.shape)}, expected [b, {sets}, ...]. "
                "Stack the inputs of a pair along the second axis."
            )
        tokens = self.each(x.flatten(0, 1), None if length is None else length.flatten())
        return (tokens.unflatten(0, (-1, sets)) + self.mark).flatten(1, 2)


IMAGES: dict[str, type[nn.Module]] = {
    "patch": PatchTokenizer,
    "conv": ConvTokenizer,
    "convnext": ConvNeXtTokenizer,
    **dict.fromkeys(get_args(Kind), TrunkTokenizer),
}


def tokenizer(config: NACConfig) -> nn.Module:
    """Create the tokenizer that the configuration names."""
    module: nn.Module
    if config.input == "image":
        module = IMAGES[config.tokenizer](config)
    else:
        module = sequence_tokenizer(config)
    return module if config.input_sets == 1 else PairTokenizer(module, config)
