# SPDX-License-Identifier: Apache-2.0
"""Scaling of input images: bytes of a fixed size, normalized by mean and std."""

import torch
from torch import Tensor, nn

from saccade.core.errors import ShapeError
from saccade.models.config_values import ImageFields


class PixelScale(nn.Module):
    """(x / 255 - mean) / std, in the type of the weights.

    Raises: ShapeError if the image does not have the configured size.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ImageFields) -> None:
        super().__init__()
        self.size = (config.height_px, config.width_px, config.channels)
        self.register_buffer("mean", torch.tensor(config.mean), persistent=False)
        self.register_buffer("std", torch.tensor(config.std), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        check_image(image, self.size)
        return (image.to(self.mean.dtype) / 255 - self.mean) / self.std


def check_image(image: Tensor, size: tuple[int, int, int]) -> None:
    """Check that an image has shape [b, *size].

    Raises: ShapeError if it does not.
    """
    if image.dim() != 4 or tuple(image.shape[1:]) != size:
        raise ShapeError(
            f"image: found shape {list(image.shape)}, expected [b, h, w, c] with "
            f"h, w, c = {size}. Resize it as the preprocessing requires."
        )
