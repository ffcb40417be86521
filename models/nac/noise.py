# SPDX-License-Identifier: Apache-2.0
"""Noise in the training of a NAC: perturbed codes."""

import torch
from torch import Tensor


def noised(code: Tensor, share: float, *, training: bool) -> Tensor:
    """In training, move each component of a code uniformly by up to `share` of its size.

    The move is constant with respect to the gradient.

    Shapes: code [u c], the same move for all samples, or [b u c] -> same.
    Source: the authors' code; the paper has none.
    """
    if not training or share == 0:
        return code
    size = code.detach().abs()
    return code + (2 * torch.rand_like(size) - 1) * (share * size)
