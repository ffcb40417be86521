# SPDX-License-Identifier: Apache-2.0
"""The image and the text tower of SPARO, which produce the tokens to pool."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from saccade.core.errors import ShapeError
from saccade.models.layers.pixels import PixelScale
from saccade.models.layers.transformer import Block
from saccade.models.layers.trunk import trunk_of
from saccade.models.sparo.config import SparoConfig


def _blocks(config: SparoConfig, layers: int, width: int, heads: int, hidden: int) -> nn.ModuleList:
    return nn.ModuleList(
        Block(width, heads, hidden, activation=config.activation, eps=config.eps)
        for _ in range(layers - config.reduce_depth)
    )


def passed(blocks: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens after all blocks, and the first one after each (or without any block).

    Shapes: x [b n w] -> [b n w], each [b w].
    """
    first = []
    for block in blocks:
        x = block(x)
        first.append(x[:, 0])
    return x, first or [x[:, 0]]


class ImageTower(nn.Module):
    """A ViT that returns the tokens of an image: class token, registers, patches.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b n image_width]: the class token and
            registers, unless the trunk has only patches, then rows of patches from the top left.
    Source: Dosovitskiy et al. 2021; with `pre_norm` the trunk of CLIP, without it that of DINO;
            with registers Darcet et al. 2023.
    """

    class_token: nn.Parameter | None
    registers: nn.Parameter | None

    def __init__(self, config: SparoConfig) -> None:
        super().__init__()
        width = config.image_width
        self.scale = PixelScale(config)
        self.patches = nn.Conv2d(
            config.channels, width, config.patch_px, config.patch_px, bias=config.patch_bias
        )
        std = width**-0.5
        token = std * torch.randn(width) if config.first_tokens else None
        self.register_parameter("class_token", None if token is None else nn.Parameter(token))
        count = max(0, config.first_tokens - 1)
        registers = std * torch.randn(count, width) if count else None
        self.register_parameter("registers", None if registers is None else nn.Parameter(registers))
        self.position = nn.Parameter(std * torch.randn(config.image_tokens, width))
        self.norm_input = nn.LayerNorm(width, eps=config.eps) if config.pre_norm else nn.Identity()
        sizes = (width, config.image_heads, config.image_hidden)
        self.blocks = _blocks(config, config.image_layers, *sizes)

    def forward(self, image: Tensor) -> Tensor:
        return self.with_first(image)[0]

    def with_first(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens of an image, and the first one, a class token, after each block.

        Shapes: image [b h w c] -> [b n image_width], each [b image_width].
        """
        x = self.patches(self.scale(image).permute(0, 3, 1, 2)).flatten(2).mT
        if (first := self.first()) is not None:
            x = torch.cat([first.expand(x.shape[0], -1, -1), x], 1)
        return passed(self.blocks, self.norm_input(x + self.position))

    def first(self) -> Tensor | None:
        """Return the tokens before the patches, if there are any.

        Shapes: -> [k image_width].
        """
        if self.class_token is None:
            return None
        token = self.class_token[None]
        return token if self.registers is None else torch.cat((token, self.registers))


class StagedTower(nn.Module):
    """A Swin or ResNet that returns the tokens of an image, without its last norm.

    The pooling begins with that norm.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b n image_width], row by row.
    """

    def __init__(self, config: SparoConfig) -> None:
        super().__init__()
        self.trunk = trunk_of(config.shape)
        self.trunk.norm = nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        words: Tensor = self.trunk(image).words
        return words


class TextTower(nn.Module):
    """A tower that returns the tokens of a text; each attends to those before it.

    Shapes: tokens [b context_length] int64 -> [b context_length text_width].
    Source: Radford et al. 2021 (CLIP), section 2.4.
    """

    causal: Tensor

    def __init__(self, config: SparoConfig) -> None:
        super().__init__()
        width, n = config.text_width, config.context_length
        self.end_token = config.end_token
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.position = nn.Parameter(0.01 * torch.randn(n, width))
        nn.init.normal_(self.embedding.weight, std=0.02)
        sizes = (width, config.text_heads, config.text_hidden)
        self.blocks = _blocks(config, config.text_layers, *sizes)
        causal = torch.full((n, n), -torch.inf).triu(1)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = self.position.shape[0]
        if tokens.dim() != 2 or tokens.shape[1] != length:
            raise ShapeError(
                f"tokens: found shape {list(tokens.shape)}, expected [b, {length}]. "
                "Encode each text to the model's full context length."
            )
        # Not self.embedding(tokens): its graph node would take the output's name.
        chosen = self.embedding.weight.index_select(0, tokens.flatten())
        x = chosen.unflatten(0, (-1, length)) + self.position
        for block in self.blocks:
            x = block(x, self.causal)
        return x

    def end(self, tokens: Tensor) -> Tensor:
        """Return the first position of the end token, or the last position if there is none.

        Shapes: tokens [b n] int64 -> [b] int64.
        """
        n = tokens.shape[1]
        if self.end_token:
            ends = tokens == self.end_token
        else:
            ends = tokens == tokens.amax(1, keepdim=True)
        places = torch.arange(n, device=tokens.device).expand_as(tokens)
        return torch.where(ends, places, n - 1).amin(1)
