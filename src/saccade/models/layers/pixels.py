# SPDX-License-Identifier: Apache-2.0
"""Images as they come in: bytes of a fixed size, brought to mean 0 and deviation 1."""

from typing import Protocol

import torch
from torch import Tensor, nn

from saccade.errors import ShapeError


class ImageFields(Protocol):
    """Fields of a configuration about the image that comes in."""

    @property
    def height_px(self) -> int:
        """Rows."""
        ...

    @property
    def width_px(self) -> int:
        """Columns."""
        ...

    @property
    def channels(self) -> int:
        """1: grey, 3: red, green, blue."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, as a share of full white."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel, as a share of full white."""
        ...


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
    """Stop an image that is not [b, *size].

    Raises: ShapeError.
    """
    if image.dim() != 4 or tuple(image.shape[1:]) != size:
        raise ShapeError(
            f"image: found shape {list(image.shape)}, expected [b, h, w, c] with "
            f"h, w, c = {size}. Resize it as the preprocessing says."
        )
