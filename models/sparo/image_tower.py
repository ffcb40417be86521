# SPDX-License-Identifier: Apache-2.0
"""The image tower: patches and a class token through a transformer."""

import torch
from torch import Tensor, nn

from saccade.models.layers.pixels import check_image
from saccade.models.layers.transformer import Block
from saccade.models.sparo.config import SparoConfig


class ImageTower(nn.Module):
    """The tokens of an image; the first is the class token.

    Shapes: image [b h w c], values 0 to 255 of any type -> [b n image_width], the class token
            and then rows of patches from the top left.
    Source: Dosovitskiy et al. 2021; with `pre_norm` the trunk of CLIP, without that of DINO.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: SparoConfig) -> None:
        super().__init__()
        width = config.image_width
        self.size = (config.height_px, config.width_px, config.channels)
        self.register_buffer("mean", torch.tensor(config.mean), persistent=False)
        self.register_buffer("std", torch.tensor(config.std), persistent=False)
        self.patches = nn.Conv2d(
            config.channels, width, config.patch_px, config.patch_px, bias=config.patch_bias
        )
        std = width**-0.5
        self.class_token = nn.Parameter(std * torch.randn(width))
        self.position = nn.Parameter(std * torch.randn(config.image_tokens, width))
        self.norm_input = nn.LayerNorm(width, eps=config.eps) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.image_heads,
                config.image_hidden,
                activation=config.activation,
                eps=config.eps,
            )
            for _ in range(config.image_layers - config.reduce_depth)
        )

    def forward(self, image: Tensor) -> Tensor:
        check_image(image, self.size)
        pixels = (image.to(self.mean.dtype) / 255 - self.mean) / self.std
        x = self.patches(pixels.permute(0, 3, 1, 2)).flatten(2).mT
        x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], 1) + self.position
        x = self.norm_input(x)
        for block in self.blocks:
            x = block(x)
        return x
