# SPDX-License-Identifier: Apache-2.0
"""Trunks of images by their shape: a ViT, a Swin or a ResNet, and what is folded in them."""

from torch import Tensor, nn

from saccade.models.layers.resnet import ResNetCells
from saccade.models.layers.swin import Swin, WindowAttention
from saccade.models.layers.vit import PatchTokens, Tokens, ViT
from saccade.models.trunks import TrunkShape


class ResNetTrunk(ResNetCells):
    """The last feature map of a ResNet as tokens, row by row; there is no norm after it.

    Shapes: image [b h w c], values 0 to 255 of any type -> `Tokens`.
    Source: He et al. 2016 (Deep Residual Learning).
    """

    def __init__(self, shape: TrunkShape) -> None:
        super().__init__(shape, shape.resnet)

    def forward(self, image: Tensor) -> Tokens:
        return Tokens(None, self.content(image), None)


def trunk_of(shape: TrunkShape, embed: nn.Module | None = None) -> nn.Module:
    """Create a trunk; a ViT has `embed` before its blocks, or one linear layer per patch."""
    if shape.is_vit:
        return ViT(shape, PatchTokens(shape) if embed is None else embed)
    return ResNetTrunk(shape) if shape.is_resnet else Swin(shape)


def block_layers(trunk: nn.Module, place: str) -> tuple[tuple[str, ...], ...]:
    """Return the parts of each block of a trunk called `place`; none of another module."""
    if isinstance(trunk, ViT):
        return tuple((f"{place}.blocks.{index}",) for index in range(len(trunk.blocks)))
    if isinstance(trunk, ResNetTrunk):
        return tuple(
            (f"{place}.resnet.layer{stage}.{index}",)
            for stage, count in enumerate(trunk.resnet.blocks, start=1)
            for index in range(count)
        )
    if not isinstance(trunk, Swin):
        return ()
    counts = [len(list(blocks.children())) for blocks in trunk.stages]
    return tuple(
        # A merging follows the last block of its stage.
        (f"{place}.stages.{stage}.{index}", *([f"{place}.mergings.{stage}"] * (index == last)))
        for stage, last in enumerate(count - 1 for count in counts)
        for index in range(last + 1)
    )


def fold_trunks(module: nn.Module) -> None:
    """Compute a Swin's position biases, and fold a ResNet's batch norms, wherever they are."""
    for inner in list(module.modules()):
        if isinstance(inner, WindowAttention):
            inner.constant = inner.bias().detach()
        elif isinstance(inner, ResNetCells):
            inner.resnet = inner.resnet.folded()
