# SPDX-License-Identifier: Apache-2.0
"""The trunk of ViT, DeiT and SoT: one or two class tokens, then word tokens; one resolution."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.transformer import Block
from saccade.models.trunks import TrunkShape

POSITION_STD = 0.02


class Tokens(NamedTuple):
    """The output of a trunk.

    Shapes: class tokens [b k d] if there are any, words [b n d], in evaluation the attention of
            the first class token to all tokens in the last block [b heads k+n].
    """

    class_tokens: Tensor | None
    words: Tensor
    attention: Tensor | None


class PatchTokens(nn.Module):
    """One linear layer per patch.

    Shapes: pixels [b c h w] -> [b n dim], rows of patches from the top left.
    """

    def __init__(self, config: TrunkShape) -> None:
        super().__init__()
        self.project = nn.Conv2d(config.channels, config.dim, config.patch_px, config.patch_px)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.project(pixels).flatten(2).mT


class ViT(nn.Module):
    """Pre-norm transformer blocks on class and word tokens with absolute positions.

    `class_tokens` has the class tokens, then the registers, which nothing reads at the end; None if
    there are neither.

    Shapes: image [b h w c], values 0 to 255 of any type -> `Tokens`.
    Source: Dosovitskiy et al. 2020; with a second class token Touvron et al. 2020 (DeiT); with
            registers Darcet et al. 2023; without class token Zhai et al. 2023 (SigLIP); with
            convolutions before it and fixed positions Xie et al. 2021 (SoT).
    """

    class_tokens: nn.Parameter | None

    def __init__(self, config: TrunkShape, embed: nn.Module) -> None:
        super().__init__()
        self.specials = config.specials
        self.words_from = config.specials + config.registers
        # It only reads the image's size, mean and std.
        self.scale: nn.Module = PixelScale(config)
        self.embed = embed
        rows, columns = config.grid
        count = self.words_from + rows * columns
        first = POSITION_STD * torch.randn(self.words_from, config.dim)
        self.register_parameter("class_tokens", nn.Parameter(first) if self.words_from else None)
        if config.position == "sinusoid":
            self.position = nn.Parameter(sinusoid(count, config.dim), requires_grad=False)
        else:
            self.position = nn.Parameter(POSITION_STD * torch.randn(count, config.dim))
        eps = config.layer_norm_epsilon
        self.norm_input = nn.LayerNorm(config.dim, eps=eps) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(
                config.dim,
                config.heads,
                config.mlp_dim,
                qkv_bias=config.qkv_bias,
                activation=config.activation,
                eps=eps,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.dim, eps=eps)

    def forward(self, image: Tensor) -> Tokens:
        x = self.embed(self.scale(image).permute(0, 3, 1, 2))
        if self.class_tokens is not None:
            x = torch.cat((self.class_tokens.expand(x.shape[0], -1, -1), x), 1)
        x = self.norm_input(x + self.position)
        for block in self.blocks[:-1]:
            x = block(x)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        # Computed here in addition to the block itself; training does not need it.
        attention = None if self.training or not self.specials else class_attention(last, x)
        return tokens_of(self.norm(last(x)), self.specials, self.words_from, attention)


def tokens_of(x: Tensor, specials: int, words_from: int, attention: Tensor | None) -> Tokens:
    """Return the class tokens, if there are any, and the words that follow them and registers.

    Shapes: x [b n d].
    """
    return Tokens(x[:, :specials] if specials else None, x[:, words_from:], attention)


def class_attention(block: Block, x: Tensor) -> Tensor:
    """Return the attention of the first token to each token.

    Shapes: x [b n d] -> [b heads n].
    """
    b, n, d = x.shape
    heads = block.attention.heads
    qkv = block.attention.qkv(block.norm_attention(x))
    query = qkv[:, :1, :d].reshape(b, 1, heads, d // heads).transpose(1, 2)
    key = qkv[..., d : 2 * d].reshape(b, n, heads, d // heads).transpose(1, 2)
    return ((query / math.sqrt(d // heads)) @ key.mT).softmax(-1)[:, :, 0]


def sinusoid(count: int, dim: int) -> Tensor:
    """Return fixed positions: sine in even, cosine in odd channels, periods 2 pi to 20,000 pi.

    Shapes: -> [count dim].
    """
    channel = np.arange(dim)
    angle = np.arange(count)[:, None] / 10000.0 ** (2 * (channel // 2) / dim)
    return torch.from_numpy(np.where(channel % 2 == 0, np.sin(angle), np.cos(angle))).float()
