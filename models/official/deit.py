# SPDX-License-Identifier: Apache-2.0
"""DeiT checkpoints, with and without a distillation token, or with SoT's head on top."""

from saccade.models.official.conversion import Converted, Official
from saccade.models.official.vit import convert_vit
from saccade.models.sot.config import IMAGENET_MEAN, IMAGENET_STD


def convert(official: Official) -> Converted:
    """Read a DeiT: a ViT with ImageNet's mean and standard deviation.

    A distilled one answers the mean of its two classifiers, as its authors evaluate it.
    Raises: SaccadeError if the file is no DeiT.
    Source: Touvron et al. 2020, and timm's names of its tensors.
    """
    return convert_vit(official, "deit", IMAGENET_MEAN, IMAGENET_STD)
