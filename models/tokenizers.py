# SPDX-License-Identifier: Apache-2.0
"""From what comes in to a set of tokens of the model's width, with their positions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.modulation import linear
from saccade.models.nac_config import NACConfig
from saccade.plugins.errors import ShapeError

POSITION_STD = 0.3


class PatchTokenizer(nn.Module):
    """Pixels scaled to mean 0 and std 1, one linear layer per patch, position, LayerNorm.

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n dim], rows of patches
            from the top left.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = PixelScale(config)
        self.project = linear(config.patch_px**2 * config.channels, config.dim)
        self.position = nn.Parameter(POSITION_STD * torch.randn(config.tokens or 1, config.dim))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, image: Tensor) -> Tensor:
        pixels = self.scale(image)
        return self.norm(self.project(patches(pixels, self.config.patch_px)) + self.position)


class ConvTokenizer(nn.Module):
    """Two 3x3 convolutions and one of the size of a patch, position, LayerNorm.

    Shapes: image [b h w c], values 0 to 255 of any type -> tokens [b n dim].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        width = max(8, config.dim // 2)
        self.scale = PixelScale(config)
        self.first = nn.Conv2d(config.channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.project = nn.Conv2d(width, config.dim, config.patch_px, stride=config.patch_px)
        for layer in (self.first, self.second, self.project):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.position = nn.Parameter(POSITION_STD * torch.randn(config.tokens or 1, config.dim))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, image: Tensor) -> Tensor:
        pixels = self.scale(image).permute(0, 3, 1, 2)
        features = F.gelu(self.second(F.gelu(self.first(pixels))))
        return self.norm(self.project(features).flatten(2).mT + self.position)


class TokenProjection(nn.Module):
    """Tokens that come in, brought to the model's width; with max_tokens, positions too.

    Shapes: tokens [b n token_dim], n at most max_tokens where that is set -> [b n dim].
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.project = linear(config.token_dim, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        if config.max_tokens:
            self.position = nn.Parameter(POSITION_STD * torch.randn(config.max_tokens, config.dim))

    def forward(self, tokens: Tensor) -> Tensor:
        expected = self.config.token_dim
        if tokens.dim() != 3 or tokens.shape[-1] != expected:
            raise ShapeError(
                f"tokens: found shape {list(tokens.shape)}, expected [b, n, {expected}]. "
                f"Bring each token to {expected} values."
            )
        x = self.project(tokens.to(self.norm.weight.dtype))
        if self.config.max_tokens:
            x = x + self.position[: tokens.shape[1]]
        return self.norm(x)


class PixelScale(nn.Module):
    """(x / 255 - mean) / std, in the type of the weights.

    Raises: ShapeError if the image does not have the configured size.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: NACConfig) -> None:
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


def patches(pixels: Tensor, side_px: int) -> Tensor:
    """Non-overlapping squares of pixels, each one vector (row, column, channel).

    Shapes: pixels [b h w c] -> [b (h w / side^2) (side side c)].
    """
    b, h, w, c = pixels.shape
    rows, columns = h // side_px, w // side_px
    grid = pixels.reshape(b, rows, side_px, columns, side_px, c).permute(0, 1, 3, 2, 4, 5)
    return grid.reshape(b, rows * columns, side_px * side_px * c)


def tokenizer(config: NACConfig) -> nn.Module:
    """The tokenizer that the configuration asks for."""
    if config.input == "tokens":
        return TokenProjection(config)
    return PatchTokenizer(config) if config.tokenizer == "patch" else ConvTokenizer(config)
