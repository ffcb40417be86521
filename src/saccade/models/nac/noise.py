# SPDX-License-Identifier: Apache-2.0
"""Noise of a NAC's training: residuals left out by sample, and codes that are moved a little."""

import torch
from torch import Tensor


def dropped_path(residual: Tensor, rate: float, *, training: bool) -> Tensor:
    """The residual, in training 0 for a share `rate` of the samples and larger for the others.

    Shapes: residual [b ...] -> same.
    Source: Huang et al. 2016 (arXiv 1603.09382), with the expectation of evaluation kept.
    """
    if not training or rate == 0:
        return residual
    shape = (residual.shape[0],) + (1,) * (residual.dim() - 1)
    keep = torch.floor(1 - rate + torch.rand(shape, dtype=residual.dtype, device=residual.device))
    return residual * keep / (1 - rate)


def noised(code: Tensor, share: float, *, training: bool) -> Tensor:
    """The code, each component in training moved evenly by up to `share` of its size.

    The move is a constant of the gradient.

    Shapes: code [... c] -> same.
    Source: the authors' code; the paper has none.
    """
    if not training or share == 0:
        return code
    size = code.detach().abs()
    return code + (2 * torch.rand_like(size) - 1) * (share * size)
