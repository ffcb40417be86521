# SPDX-License-Identifier: Apache-2.0
"""The sizes of residual networks, for configurations, which import no torch."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

ResNetName = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
# Blocks of the four stages. The stages of the first two have basic blocks, the others bottlenecks.
BLOCKS: Mapping[str, tuple[int, int, int, int]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
BASIC = ("resnet18", "resnet34")
WIDTHS, EXPANSION = (64, 128, 256, 512), 4  # of the stages; a bottleneck ends four times as wide
STEM_PX, STRIDE = 4, 32  # pixels of a cell's side, before the first stage and after the fourth
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images of torchvision's weights


class ResNetSizes(NamedTuple):
    """The sizes of one network."""

    blocks: tuple[int, ...]  # per stage
    widths: tuple[int, ...]  # channels per stage; the stem has the first
    basic: bool  # two convolutions of 3x3 per block, else a bottleneck of three

    @property
    def features(self) -> int:
        """Number of features of a cell."""
        return self.widths[-1] * (1 if self.basic else EXPANSION)


def sizes_of(name: str) -> ResNetSizes:
    """Return the sizes of a network in `BLOCKS`."""
    return ResNetSizes(BLOCKS[name], WIDTHS, name in BASIC)
