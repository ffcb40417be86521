# SPDX-License-Identifier: Apache-2.0
"""Noise in the training of a NAC: residuals left out by sample, and perturbed codes."""

import torch
from torch import Tensor

from saccade.models.layers.batch_rows import drawn


def dropped_path(residual: Tensor, rate: float, *, training: bool) -> Tensor:
    """In training, set a share `rate` of samples' residuals to 0 and scale up the others.

    Shapes: residual [b ...] -> same.
    Source: Huang et al. 2016 (arXiv 1603.09382), with the same expectation as in evaluation.
    """
    if not training or rate == 0:
        return residual
    shape = (residual.shape[0],) + (1,) * (residual.dim() - 1)
    keep = torch.floor(1 - rate + drawn(torch.rand, shape, residual))
    return residual * keep / (1 - rate)


def noised(code: Tensor, share: float, *, training: bool) -> Tensor:
    """In training, move each component of a code uniformly by up to `share` of its size.

    The move is constant with respect to the gradient.

    Shapes: code [u c], the same move for all samples, or [b u c] -> same.
    Source: the authors' code; the paper has none.
    """
    if not training or share == 0:
        return code
    size = code.detach().abs()
    uniform = drawn(torch.rand, size.shape, size, by_row=code.dim() == 3)
    return code + (2 * uniform - 1) * (share * size)
