# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: from any input to tokens of the model's width, with their positions."""

import math
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import ShapeError
from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.trunk import trunk_of
from saccade.models.nac.config import NACConfig
from saccade.models.nac.layers import without_padding
from saccade.models.nac.modulation import linear
from saccade.models.trunks import Kind

POSITION_STD = 0.3
BYTES = 256


class TokenProjection(nn.Module):
    """Projects input tokens to the model's width and, with max_tokens, adds positions.

    Shapes: tokens [b n token_dim], n at most max_tokens if that is set -> [b n dim].
    """

    position: nn.Parameter | None

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.project = linear(config.token_dim, config.tokens_width)
        self.norm = nn.LayerNorm(config.tokens_width)
        self.register_parameter("position", learned_positions(config))

    def forward(self, tokens: Tensor, length: Tensor | None = None) -> Tensor:
        expected = self.config.token_dim
        if tokens.dim() != 3 or tokens.shape[-1] != expected:
            raise ShapeError(
                f"tokens: found shape {list(tokens.shape)}, expected [b, n, {expected}]. "
                f"Give each token {expected} values."
            )
        check_count("tokens", tokens, self.config)
        x = self.project(tokens.to(self.norm.weight.dtype))
        return self.norm(with_position(x, self.position, self.config))


class PointTokenizer(nn.Module):
    """Coordinates, their sines and cosines at some octaves, one linear layer, LayerNorm.

    Points are a set; their coordinates are their positions.

    Shapes: points [b n 3], within about -1 to 1 -> tokens [b n dim].
    """

    octaves: Tensor

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        octaves = [math.ldexp(math.pi, band) for band in range(config.point_bands)]
        self.register_buffer("octaves", torch.tensor(octaves), persistent=False)
        self.project = linear(3 + 6 * config.point_bands, config.tokens_width)
        self.norm = nn.LayerNorm(config.tokens_width)

    def forward(self, points: Tensor, length: Tensor | None = None) -> Tensor:
        if points.dim() != 3 or points.shape[-1] != 3:
            raise ShapeError(
                f"points: found shape {list(points.shape)}, expected [b, n, 3]. "
                "Pass three coordinates per point."
            )
        check_count("points", points, self.config)
        x = points.to(self.norm.weight.dtype)
        turns = (x.unsqueeze(-1) * self.octaves).flatten(2)
        return self.norm(self.project(torch.cat((x, turns.sin(), turns.cos()), -1)))


class LocalLayer(nn.Module):
    """x + linear(gelu(convolution(LayerNorm(x)))) over neighboring positions; padding counts as 0.

    Shapes: x [b n d], length [b] -> [b n d].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.tokens_width)
        width = config.local_width
        self.convolution = nn.Conv1d(
            config.tokens_width, config.tokens_width, width, padding=width // 2
        )
        self.output = linear(config.tokens_width, config.tokens_width)

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        normed = without_padding(self.norm(x), length)
        return x + self.output(F.gelu(self.convolution(normed.mT).mT))


class SymbolTokenizer(nn.Module):
    """One learned vector per symbol and its position, local layers, LayerNorm.

    Anything that is not an index into the vocabulary gets the last vector of the table. Bytes have
    256 symbols, all of which are known.

    Shapes: symbols [b n] of integers, n at most max_tokens, length [b] -> tokens [b n dim].
    """

    position: nn.Parameter | None

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.known = BYTES if config.input == "bytes" else len(config.vocabulary)
        rows = self.known + (config.input == "characters")
        self.symbol_embedding = nn.Parameter(torch.randn(rows, config.tokens_width))
        self.local = nn.ModuleList(LocalLayer(config) for _ in range(config.local_layers))
        self.norm = nn.LayerNorm(config.tokens_width)
        self.register_parameter("position", learned_positions(config))

    def forward(self, symbols: Tensor, length: Tensor | None = None) -> Tensor:
        name = self.config.input
        if symbols.dim() != 2 or symbols.is_floating_point():
            raise ShapeError(
                f"{name}: found {symbols.dtype} of shape {list(symbols.shape)}, expected whole "
                f"numbers [b, n]. Pass one {name[:-1]} per position."
            )
        check_count(name, symbols, self.config)
        index = symbols.long()
        if name == "characters":
            index = torch.where((index >= 0) & (index < self.known), index, self.known)
        # F.embedding's result would take the name of the output `embedding` in an exported graph.
        x = self.symbol_embedding.index_select(0, index.flatten()).unflatten(0, index.shape)
        x = with_position(x, self.position, self.config)
        for layer in self.local:
            x = layer(x, length)
        return self.norm(x)


def sequence_tokenizer(config: NACConfig) -> nn.Module:
    """Create the tokenizer of tokens, points, characters or bytes."""
    if config.input == "tokens":
        return TokenProjection(config)
    return PointTokenizer(config) if config.input == "points" else SymbolTokenizer(config)


def learned_positions(config: NACConfig) -> nn.Parameter | None:
    """Return one vector per position, if the configuration has learned positions."""
    if config.positions != "learned" or not config.max_tokens:
        return None
    return nn.Parameter(POSITION_STD * torch.randn(config.max_tokens, config.tokens_width))


def with_position(x: Tensor, learned: Tensor | None, config: NACConfig) -> Tensor:
    """Add the vectors of their positions to tokens, if there are positions.

    Shapes: x [b n d], learned [max_tokens d] -> [b n d].
    """
    if learned is not None:
        return x + learned[: x.shape[1]]
    if config.positions == "sinusoidal" and config.max_tokens:
        return x + sinusoids(config.max_tokens, config.tokens_width).to(x)[: x.shape[1]]
    return x


def sinusoids(count: int, dim: int) -> Tensor:
    """Return sines, then cosines of the position at wavelengths from 2 pi to `count` times that.

    Shapes: -> [count dim].
    Source: Vaswani et al. 2017, section 3.5, whose longest wavelength is 10,000 times 2 pi.
    """
    half = (dim + 1) // 2
    rate = count ** -(torch.arange(half, dtype=torch.float64) / max(1, half - 1))
    turns = torch.arange(count, dtype=torch.float64)[:, None] * rate
    return torch.cat((turns.sin(), turns.cos()), -1)[:, :dim]


def check_count(name: str, x: Tensor, config: NACConfig) -> None:
    """Check that an input has at most the model's number of positions.

    Raises: ShapeError if it has more.
    """
    if config.max_tokens and x.shape[1] > config.max_tokens:
        raise ShapeError(
            f"{name}: found {x.shape[1]} in a sample, expected at most {config.max_tokens} "
            "(max_tokens). Shorten the input, or train a model with a larger max_tokens."
        )


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
