# SPDX-License-Identifier: Apache-2.0
"""Layers that a captioner and its folded form share: convolutions, grid attention, a step."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.models.captioner.config import CaptionerConfig
from saccade.plugins.ops import sparsemax, tvmax


class StepOutput(NamedTuple):
    """The output of one step.

    Shapes: logits [b v], h and c [b n], attention and input_attention [b H W], error [b]: the
            certified distance of TVMax from its minimum, None for the other maps.
    """

    logits: Tensor
    h: Tensor
    c: Tensor
    attention: Tensor
    input_attention: Tensor
    error: Tensor | None


def convolutions(config: CaptionerConfig) -> nn.Sequential:
    """Create a convolution, batch norm and ReLU for each of the widths.

    Shapes: [b c h w] -> [b widths[-1] H W].
    """
    layers: list[nn.Module] = []
    before = config.channels
    for width, stride in zip(config.widths, config.strides, strict=True):
        reach = (stride + 1) // 2
        layers += [
            nn.Conv2d(before, width, 2 * reach + 1, stride, reach, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
    return nn.Sequential(*layers)


def feature_parts(features: Tensor, config: CaptionerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Split features into the cells' vectors and their keys for input and output attention.

    Shapes: features [b H W dim + 2 a] -> [b H W dim], [b H W a], [b H W a].
    """
    g, a = config.dim, config.attention_dim
    return features[..., :g], features[..., g : g + a], features[..., g + a :]


def scored(key: Tensor, query: Tensor, score: nn.Linear) -> Tensor:
    """Return w tanh(affine([v; h])), with the affine map split into its cell and state parts.

    Shapes: key [b H W a], query [b a] -> [b H W].
    """
    return score(torch.tanh(key + query[:, None, None]))[..., 0]


def attend(weights: Tensor, visual: Tensor) -> Tensor:
    """Return the weighted mean of the cells.

    Shapes: weights [b H W], visual [b H W g] -> [b g].
    """
    return (weights.flatten(1)[:, None] @ visual.flatten(1, 2))[:, 0]


def output_weights(score: Tensor, config: CaptionerConfig) -> tuple[Tensor, Tensor | None]:
    """Map scores to weights as configured, and return the bound of the error.

    Shapes: score [b H W] -> weights [b H W], error [b] of TVMax.
    """
    if config.attention == "tvmax":
        limits = {"tolerance": config.tolerance, "max_iterations": config.max_iterations}
        return tvmax(score, lam=config.lam, return_error=True, **limits)
    flat = score.flatten(1)
    weights = sparsemax(flat) if config.attention == "sparsemax" else flat.softmax(-1)
    return weights.view_as(score), None
