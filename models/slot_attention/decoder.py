# SPDX-License-Identifier: Apache-2.0
"""The decoder: each slot is broadcast to its own grid and paints; alphas mix the slots."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.encoders import SameConv, coordinates
from saccade.models.slot_attention.rounds import SlotState, linear, relative_grid, scaled_normal_


class Painting(NamedTuple):
    """Output of the decoder.

    Shapes: reconstruction [b H W c], masks [b k H W], alphas [b k H W] before the softmax over
            slots, layers [b k H W c].
    """

    reconstruction: Tensor
    masks: Tensor
    alphas: Tensor
    layers: Tensor


class TransposedConv(nn.Module):
    """A transposed convolution whose output has exactly size * stride cells.

    Shapes: [b c h w] -> [b outputs h*stride w*stride].
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        front = kernel - 1 if stride > kernel - 1 else -(-(kernel + stride - 2) // 2)
        self.conv = nn.ConvTranspose2d(
            inputs,
            outputs,
            kernel,
            stride,
            padding=kernel - 1 - front,
            output_padding=max(0, stride - kernel),
        )
        scaled_normal_(self.conv.weight, inputs * kernel**2)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        height, width = (int(size) * self.stride for size in x.shape[-2:])
        return self.conv(x)[:, :, :height, :width]


class MLPBackbone(nn.Module):
    """The same layers for every cell, each followed by a ReLU.

    Shapes: [.. d] -> [.. channels].
    Source: Biza et al. 2022, table 8.
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        widths = (config.slot_dim, *config.decoder_channels)
        self.layers = nn.ModuleList(linear(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class CNNBackbone(nn.Module):
    """Convolutions, some of them transposed, each followed by a ReLU.

    Shapes: [b k h w d] -> [b k H W channels].
    Source: Biza et al. 2022, table 7.
    """

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        inputs, layers = config.slot_dim, []
        for outputs, kernel, stride, transposed in zip(
            config.decoder_channels,
            config.decoder_kernels,
            config.decoder_strides,
            config.decoder_transposed,
            strict=True,
        ):
            layer = TransposedConv if transposed else SameConv
            layers.append(layer(inputs, outputs, kernel, stride))
            inputs = outputs
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        slots = x.shape[1]
        x = x.flatten(0, 1).permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x).relu()
        return x.permute(0, 2, 3, 1).unflatten(0, (-1, slots))


class Decoder(nn.Module):
    """Slots on their own grids, a backbone, and a color and an alpha per cell.

    Shapes: a state of slots [b k d], with positions and scales if the configuration has them
            -> Painting.
    Source: Biza et al. 2022, tables 7 and 8; Watters et al. 2019 for the broadcast.
    """

    float32_products = True  # a softmax over slots can turn rounded alphas into another mask
    grid: Tensor

    def __init__(self, config: SlotConfig) -> None:
        super().__init__()
        self.config = config
        height, width = config.decoder_height, config.decoder_width
        self.register_buffer("grid", coordinates(height, width))
        self.project = linear(2, config.slot_dim)
        backbone = MLPBackbone if config.decoder == "mlp" else CNNBackbone
        self.backbone = backbone(config)
        self.alpha = linear(config.decoder_channels[-1], 1)
        self.colour = linear(config.decoder_channels[-1], config.channels)

    def forward(self, state: SlotState) -> Painting:
        return self.paint(self.backbone(self.broadcast(state)))

    def broadcast(self, state: SlotState) -> Tensor:
        """Return each slot plus the linear layer of its grid.

        Shapes: -> [b k h w d].
        """
        return state.slots[:, :, None, None] + self.project(self.relative(state))

    def relative(self, state: SlotState) -> Tensor:
        """Return the grid as each slot sees it; without positions it is the same for all.

        Shapes: -> [b or 1, k or 1, h, w, 2].
        """
        if state.positions is None:
            return self.grid[:, None]
        config = self.config
        factor = config.decoder_scales_factor if state.scales is not None else 1.0
        relative = relative_grid(self.grid.flatten(1, 2)[:, None], state, factor)
        return relative.unflatten(2, (config.decoder_height, config.decoder_width))

    def paint(self, features: Tensor) -> Painting:
        """Mix the slots' colors by the softmax of their alphas.

        Shapes: features [b k H W channels] -> Painting.
        """
        alphas, layers = self.alpha(features).squeeze(-1), self.colour(features)
        masks = alphas.softmax(1)
        picture = (masks[..., None] * layers).sum(1)
        return Painting(picture, masks, alphas, layers)


def segmentation(masks: Tensor) -> Tensor:
    """Return the slot of each cell; ties go to the first slot.

    Shapes: masks [b k H W] -> int64 [b H W].
    """
    return torch.argmax(masks, 1)
