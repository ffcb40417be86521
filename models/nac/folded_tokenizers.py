# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with the pixel scale in their weights."""

from torch import Tensor, nn

from saccade.models.layers.pixels import check_image
from saccade.models.nac.sequence_tokenizers import SymbolTokenizer, TokenProjection, sinusoids
from saccade.models.nac.tokenizers import PairTokenizer, PatchTokenizer, patches


class FoldedPatches(nn.Module):
    """A patch tokenizer with the pixel scale in its weights and all biases in the position.

    Shapes: image [b h w c] -> [b n d].
    """

    weight: Tensor
    position: Tensor

    def __init__(self, source: PatchTokenizer) -> None:
        super().__init__()
        self.patch_px, self.norm, self.size = source.config.patch_px, source.norm, source.scale.size
        repeat = source.config.patch_px**2
        std, mean = source.scale.std.repeat(repeat), source.scale.mean.repeat(repeat)
        weight = source.project.weight / std
        self.register_buffer("weight", (weight / 255).mT.contiguous())
        self.register_buffer("position", source.position + source.project.bias - weight @ mean)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        check_image(image, self.size)
        pixels = patches(image.to(self.weight.dtype), self.patch_px)
        return self.norm((pixels @ self.weight).add_(self.position))


def fold_tokenizer(source: nn.Module) -> nn.Module:
    """The tokenizer with its pixel scale folded where that is exact, and its positions computed.

    A convolution pads with zeros after scaling, so its scale stays.
    """
    if isinstance(source, PairTokenizer):
        source.each = fold_tokenizer(source.each)
        return source
    if isinstance(source, TokenProjection | SymbolTokenizer):
        config = source.config
        if source.position is None and config.positions == "sinusoidal" and config.max_tokens:
            fixed = sinusoids(config.max_tokens, config.tokens_width).to(source.norm.weight)
            source.position = nn.Parameter(fixed)
    return FoldedPatches(source) if isinstance(source, PatchTokenizer) else source
