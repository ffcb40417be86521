# SPDX-License-Identifier: Apache-2.0
"""The trunk of Swin: windowed attention, shifted in every other block; stages halve the grid."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.transformer import dropped_path
from saccade.models.layers.vit import Tokens
from saccade.models.trunks import TrunkShape

HIDDEN_BIAS = 512  # of the MLP that gives the bias in V2
MASKED = -100.0  # added to a logit between tokens that only a shift made neighbors


class WindowAttention(nn.Module):
    """Self-attention inside windows, with a learned bias by relative position.

    Shapes: x [b windows n d] -> the same; the bias is [windows or 1, heads, n, n].
    """

    places: Tensor
    mask: Tensor
    constant: Tensor | None  # the precomputed bias, in the folded form

    def __init__(
        self, dim: int, heads: int, window: tuple[int, int], mask: Tensor, bias: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.out = nn.Linear(dim, dim)
        offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative = nn.Parameter(0.02 * torch.randn(offsets, heads))
        self.register_buffer("places", _relative_places(*window), persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("constant", None, persistent=False)

    def bias(self) -> Tensor:
        """Return the bias of the logits: by relative position, and MASKED across a shift's seam."""
        if self.constant is not None:
            return self.constant
        return self.relative[self.places].permute(2, 0, 1) + self.mask[:, None]

    def forward(self, x: Tensor) -> Tensor:
        b, windows, n, d = x.shape
        parts = self.qkv(x).reshape(b, windows, n, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(3, 0, 1, 4, 2, 5)
        weights = (self.logits(q, k) + self.bias()).softmax(-1)
        return self.out((weights @ v).transpose(2, 3).reshape(b, windows, n, d))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scaled products of queries and keys."""
        return (q / math.sqrt(q.shape[-1])) @ k.mT


class CosineAttention(WindowAttention):
    """Attention by the cosine of query and key; an MLP of log-spaced offsets gives the bias.

    Shapes: as WindowAttention.
    Source: Liu et al. 2022, Swin Transformer V2, eq. 2 to 4; the sigmoid and its factor are in the
            authors' code.
    """

    coordinates: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        window: tuple[int, int],
        mask: Tensor,
        bias: bool,
        trained: int,
    ) -> None:
        super().__init__(dim, heads, window, mask, bias)
        del self.relative
        self.log_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))
        self.position_bias = nn.Sequential(
            nn.Linear(2, HIDDEN_BIAS), nn.ReLU(), nn.Linear(HIDDEN_BIAS, heads, bias=False)
        )
        self.register_buffer("coordinates", _log_offsets(window, trained), persistent=False)

    def bias(self) -> Tensor:
        """Return the bias of the logits, as WindowAttention does."""
        if self.constant is not None:
            return self.constant
        table = 16 * torch.sigmoid(self.position_bias(self.coordinates))
        return table[self.places].permute(2, 0, 1) + self.mask[:, None]

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the cosines of queries and keys, times a learned scale of at most 100."""
        scale = self.log_scale.clamp(max=math.log(100)).exp()
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale


class SwinBlock(nn.Module):
    """A block: x + attention in (shifted) windows, then x + MLP; V2 normalizes both afterwards.

    Shapes: x [b rows columns d] -> the same.
    """

    def __init__(self, config: TrunkShape, stage: int, *, shifted: bool) -> None:
        super().__init__()
        dim, heads = config.dim * 2**stage, config.stage_heads[stage]
        grid, self.norm_first = config.stage_grids[stage], config.trunk == "swin"
        eps = config.layer_norm_epsilon
        # A grid no larger than the window is a single window and cannot be shifted.
        whole = min(grid) <= config.window
        side = min(grid) if whole else config.window
        self.window = (side, side)
        self.shift = 0 if whole or not shifted else side // 2
        self.norm_attention = nn.LayerNorm(dim, eps=eps)
        mask = _shift_mask(grid, side, self.shift)
        sizes = (dim, heads, self.window, mask, config.qkv_bias)
        if self.norm_first:
            self.attention = WindowAttention(*sizes)
        else:
            trained = (*config.trained_windows, *[0] * len(config.stage_layers))[stage]
            self.attention = CosineAttention(*sizes, trained)
        self.norm_mlp = nn.LayerNorm(dim, eps=eps)
        hidden = 4 * dim
        self.widen = nn.Linear(dim, hidden)
        self.narrow = nn.Linear(hidden, dim)
        self.stochastic_depth = 0.0  # rate of `dropped_path`, set by training

    def forward(self, x: Tensor) -> Tensor:
        _, rows, columns, _ = x.shape
        shift, side = self.shift, self.window[0]
        inner = self.norm_attention(x) if self.norm_first else x
        if shift:
            inner = _roll(inner, shift)
        inner = self.attention(_windows(inner, side))
        inner = _joined(inner, side, rows, columns)
        if shift:
            inner = _roll(inner, -shift)
        dropped = partial(dropped_path, rate=self.stochastic_depth, training=self.training)
        if not self.norm_first:
            x = x + dropped(self.norm_attention(inner))
            return x + dropped(self.norm_mlp(self.narrow(F.gelu(self.widen(x)))))
        x = x + dropped(inner)
        return x + dropped(self.narrow(F.gelu(self.widen(self.norm_mlp(x)))))


class Merging(nn.Module):
    """Merges four neighboring tokens into one of twice the width; V2 normalizes it afterwards.

    Shapes: x [b rows columns d] -> [b rows/2 columns/2 2d].
    """

    def __init__(self, dim: int, eps: float, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm = nn.LayerNorm(4 * dim if norm_first else 2 * dim, eps=eps)
        self.reduce = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = (x[:, row::2, column::2] for column in (0, 1) for row in (0, 1))
        merged = torch.cat(tuple(corners), -1)
        return self.reduce(self.norm(merged)) if self.norm_first else self.norm(self.reduce(merged))


class Swin(nn.Module):
    """Patches, stages of windowed blocks, a norm; no class token.

    Shapes: image [b h w c], values 0 to 255 of any type -> `Tokens`.
    Source: Liu et al. 2021, Swin Transformer; Liu et al. 2022, Swin Transformer V2.
    """

    def __init__(self, config: TrunkShape) -> None:
        super().__init__()
        eps, dim, side = config.layer_norm_epsilon, config.dim, config.patch_px
        self.grid = config.grid
        # It only reads the image's size, mean and std.
        self.scale: nn.Module = PixelScale(config)
        self.embed = nn.Conv2d(config.channels, dim, side, side)
        self.embed_norm = nn.LayerNorm(dim, eps=eps)
        self.stages = nn.ModuleList()
        self.mergings = nn.ModuleList()
        for stage, layers in enumerate(config.stage_layers):
            blocks = (SwinBlock(config, stage, shifted=index % 2 == 1) for index in range(layers))
            self.stages.append(nn.Sequential(*blocks))
            if stage + 1 < len(config.stage_layers):
                norm_first = config.trunk == "swin"
                self.mergings.append(Merging(dim * 2**stage, eps, norm_first=norm_first))
        self.norm = nn.LayerNorm(config.width, eps=eps)

    def forward(self, image: Tensor) -> Tokens:
        return self.tokens(self.scale(image).permute(0, 3, 1, 2))

    def tokens(self, pixels: Tensor) -> Tokens:
        """Return the tokens of scaled pixels.

        Shapes: pixels [b c h w].
        """
        x = self.embed(pixels)
        x = self.embed_norm(x.permute(0, 2, 3, 1))
        for stage, blocks in enumerate(self.stages):
            x = blocks(x)
            if stage < len(self.mergings):
                x = self.mergings[stage](x)
        return Tokens(None, self.norm(x.flatten(1, 2)), None)


def _roll(x: Tensor, by: int) -> Tensor:
    """Move rows and columns up and left by `by`, with wrap-around (slices, not torch.roll)."""
    x = torch.cat((x[:, by:], x[:, :by]), 1)
    return torch.cat((x[:, :, by:], x[:, :, :by]), 2)


def _windows(x: Tensor, side: int) -> Tensor:
    b, rows, columns, d = x.shape
    x = x.reshape(b, rows // side, side, columns // side, side, d).transpose(2, 3)
    return x.reshape(b, (rows // side) * (columns // side), side * side, d)


def _joined(x: Tensor, side: int, rows: int, columns: int) -> Tensor:
    b, _, _, d = x.shape
    x = x.reshape(b, rows // side, columns // side, side, side, d).transpose(2, 3)
    return x.reshape(b, rows, columns, d)


def _relative_places(rows: int, columns: int) -> Tensor:
    """Return the row of the bias table for each pair of a window's tokens.

    Shapes: -> [n n] int64.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    down = row[:, None] - row[None] + rows - 1
    right = column[:, None] - column[None] + columns - 1
    return torch.from_numpy(down * (2 * columns - 1) + right)


def _log_offsets(window: tuple[int, int], trained: int) -> Tensor:
    """Return the offsets of the bias table: sign(d) log2(1 + |d|) / 3, with d from -8 to 8.

    A window larger than the one of `trained` tokens, if that is not 0, continues beyond 8.

    Shapes: -> [(2 rows - 1) (2 columns - 1) 2].
    """
    sides = []
    for side in window:
        reach = (trained or side) - 1
        sides.append(torch.arange(1 - side, side).float() / max(1, reach) * 8)
    offsets = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).flatten(0, 1)
    return offsets.sign() * torch.log2(offsets.abs() + 1) / math.log2(8)


def _shift_mask(grid: tuple[int, int], side: int, shift: int) -> Tensor:
    """Return 0 between tokens of one region before the shift, MASKED between others.

    Shapes: -> [windows n n], or [1 1 1] of 0 without a shift.
    """
    if shift == 0:
        return torch.zeros(1, 1, 1)
    bands = [
        np.searchsorted((length - side, length - shift), np.arange(length), side="right")
        for length in grid
    ]
    region = torch.from_numpy(bands[0][:, None] * 3 + bands[1][None])
    region = _windows(region[None, :, :, None].float(), side)[0, :, :, 0]
    apart = region[:, None, :] != region[:, :, None]
    return apart.float() * MASKED
