# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of vectors, points, characters and bytes."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import ShapeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.layers import without_padding
from saccade.models.nac.modulation import linear

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
