# SPDX-License-Identifier: Apache-2.0
"""A second-order transformer in evaluation with folded constants."""

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from saccade.models.layers.pixels import check_image
from saccade.models.layers.swin import Swin
from saccade.models.layers.transformer import ACTIVATIONS, Block
from saccade.models.layers.trunk import ResNetTrunk, fold_trunks
from saccade.models.layers.vit import Tokens, ViT, class_attention, tokens_of
from saccade.models.sot.components import SoTFunction
from saccade.models.sot.head import Head
from saccade.models.sot.model import SoT
from saccade.models.sot.tokens import ConvNorm, ConvolutionTokens, DenseBlock, NonLocalBlock


class FoldedSoT(SoTFunction):
    """The result of `SoT.fold`, for evaluation only.

    Batch norms are folded into their convolutions, the pixel scale into the first one. Positions
    and biases are one constant per token, Swin's position biases one constant per block. Sum
    fusion is one linear layer on both states. If only the class token is classified, the last
    block computes only that token.

    Source: equal to the unfolded model up to rounding.
    """

    def __init__(self, source: SoT) -> None:
        super().__init__()
        self.config = source.config
        self.head = _folded_head(source.head)
        self.trunk: nn.Module = source.trunk
        if isinstance(source.trunk, ViT):
            self.trunk = FoldedViT(source.trunk, class_only=self.config.fusion == "class")
        elif isinstance(source.trunk, Swin):
            self.trunk = FoldedSwin(source.trunk)
        elif isinstance(source.trunk, ResNetTrunk):
            fold_trunks(source.trunk)


class FoldedPixels(nn.Module):
    """The image minus its mean; the next convolution contains the division.

    Shapes: image [b h w c] -> [b c h w]. Padding with 0 stays padding with the mean.
    """

    offset: Tensor

    def __init__(self, source: nn.Module, conv: nn.Conv2d) -> None:
        super().__init__()
        mean, std = source.get_buffer("mean"), source.get_buffer("std")
        self.size = cast(tuple[int, int, int], source.size)
        conv.weight.div_(255 * std[:, None, None])
        self.register_buffer("offset", 255 * mean, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        check_image(image, self.size)
        return (image.to(self.offset.dtype) - self.offset).permute(0, 3, 1, 2)


class FoldedViT(nn.Module):
    """A ViT in evaluation.

    Shapes: as `ViT`; with `class_only` the returned words are the class tokens again.
    """

    first: Tensor | None
    position: Tensor

    def __init__(self, source: ViT, *, class_only: bool) -> None:
        super().__init__()
        self.specials, self.words_from = source.specials, source.words_from
        self.blocks, self.norm, self.embed = source.blocks, source.norm, source.embed
        for module in list(self.embed.modules()):
            _fold_norms(module)
        conv = self.embed.stem if isinstance(self.embed, ConvolutionTokens) else self.embed.project
        assert isinstance(conv, nn.Conv2d) and isinstance(self.embed.project, nn.Conv2d)
        self.scale = FoldedPixels(source.scale, conv)
        project = self.embed.project
        assert project.bias is not None
        position = source.position
        self.norm_input = source.norm_input
        first: Tensor | None = None
        if source.class_tokens is not None:
            first = source.norm_input(source.class_tokens + position[: self.words_from])
        self.register_buffer("first", first)
        self.register_buffer("position", position[self.words_from :] + project.bias)
        project.bias = None
        self.class_only = class_only

    def forward(self, image: Tensor) -> Tokens:
        x = self.norm_input(self.embed(self.scale(image)) + self.position)
        if self.first is not None:
            x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1)
        for block in self.blocks[:-1]:
            x = block(x)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        if self.class_only:
            tokens, attention = _first_tokens(last, x, self.specials)
            tokens = self.norm(tokens)
            return Tokens(tokens, tokens, attention)
        weights = class_attention(last, x) if self.specials else None
        return tokens_of(self.norm(last(x)), self.specials, self.words_from, weights)


class FoldedSwin(nn.Module):
    """A Swin in evaluation.

    Shapes: as `Swin`.
    """

    def __init__(self, source: Swin) -> None:
        super().__init__()
        self.inner = source
        fold_trunks(source)
        source.scale = FoldedPixels(source.scale, source.embed)

    def forward(self, image: Tensor) -> Tokens:
        return self.inner.tokens(self.inner.scale(image))


def _first_tokens(block: Block, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a block's first tokens, and the attention of the very first to all tokens.

    Shapes: x [b n d] -> [b count d], [b heads n].
    """
    b, n, d = x.shape
    heads = block.attention.heads
    normed = block.norm_attention(x)
    weight, bias = block.attention.qkv.weight, block.attention.qkv.bias
    biases = (None, None) if bias is None else (bias[:d], bias[d:])
    query = nn.functional.linear(normed[:, :count], weight[:d], biases[0])
    pairs = nn.functional.linear(normed, weight[d:], biases[1])
    query = query.reshape(b, count, heads, d // heads).transpose(1, 2)
    key, value = pairs.reshape(b, n, 2, heads, d // heads).permute(2, 0, 3, 1, 4)
    weights = ((query / math.sqrt(d // heads)) @ key.mT).softmax(-1)
    attended = (weights @ value).transpose(1, 2).reshape(b, count, d)
    x = x[:, :count] + block.attention.out(attended)
    hidden = ACTIVATIONS[block.activation](block.widen(block.norm_mlp(x)))
    return x + block.narrow(hidden), weights[:, :, 0]


def _folded_head(head: Head) -> Head:
    """Rewrite sum fusion as the equivalent concatenation."""
    if head.config.fusion != "sum":
        return head
    by_class, by_words = head.class_fc, head.word_fc
    assert by_class is not None and by_words is not None
    weight = torch.cat((by_class.weight, by_words.weight), 1)
    both = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
    both.weight.copy_(weight)
    both.bias.copy_(by_class.bias + by_words.bias)
    head.config = replace(head.config, fusion="concat", class_projection=0)
    head.class_fc, head.word_fc = None, both
    return head


def _fold_norms(module: nn.Module) -> None:
    """Fold a block's batch norms into the convolutions directly before or after them."""
    if isinstance(module, ConvNorm):
        scale, shift = _affine(module.norm)
        _scale_outputs(module.conv, scale, shift)
        module.norm = nn.Identity()
    elif isinstance(module, DenseBlock):
        # Directly before a 1x1 convolution: scale and shift its inputs.
        scale, shift = _affine(module.norm)
        conv = module.narrow
        conv.bias = nn.Parameter(conv.weight[:, :, 0, 0] @ shift)
        conv.weight.mul_(scale[:, None, None])
        module.norm = nn.Identity()
    elif isinstance(module, NonLocalBlock):
        scale, shift = _affine(module.norm)
        _fold_norms(module.shortcut)
        _scale_outputs(module.widen, scale, shift)
        _scale_outputs(module.shortcut.conv, scale, torch.zeros_like(shift))
        module.norm = nn.Identity()


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the scale and shift of a batch norm in evaluation; 1 and 0 if already folded."""
    if not isinstance(norm, nn.BatchNorm2d):
        return torch.ones(()), torch.zeros(())
    assert norm.running_var is not None and norm.running_mean is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale, norm.bias - norm.running_mean * scale


def _scale_outputs(conv: nn.Conv2d, scale: Tensor, shift: Tensor) -> None:
    if scale.dim() == 0:
        return
    bias = 0 if conv.bias is None else conv.bias * scale
    conv.weight.mul_(scale[:, None, None, None])
    conv.bias = nn.Parameter(shift + bias)
