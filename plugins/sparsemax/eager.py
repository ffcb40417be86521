# SPDX-License-Identifier: Apache-2.0
"""Sparsemax in torch: operator, gradient, and an implementation without native kernels."""

from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import ShapeError
from saccade.plugins import derivatives, dispatch
from saccade.plugins.sparsemax.contract import sparsemax as contract


def threshold(z: Tensor) -> Tensor:
    """Compute the threshold that is subtracted from each row; NaN if the row has no answer.

    Newton's iteration from below: the support only shrinks, and is found when it stops shrinking.
    This takes a few passes instead of a sort, and additional passes change nothing.

    Shapes: z [... n], largest entry 0 -> [... 1].
    Source: Michelot 1986, on the simplex.
    """
    lowered_by = torch.full_like(z[..., :1], -1)
    count = None
    while True:
        inside = z > lowered_by
        size = inside.sum(-1, keepdim=True)
        if count is not None and torch.equal(size, count):
            return lowered_by + z.amax(-1, keepdim=True)
        total = torch.where(inside, z, 0).sum(-1, keepdim=True)
        lowered_by = torch.maximum(lowered_by, (total - 1) / size.clamp(min=1))
        count = size


def project(x: Tensor) -> Tensor:
    """Project each row onto the simplex.

    Shapes: x [... n], n >= 1 -> the same.
    """
    z = x - x.amax(-1, keepdim=True)
    return (z - threshold(z)).clamp_(min=0)


def support_rule(p: Tensor, gradient: Tensor) -> Tensor:
    """Compute the gradient of the logits: minus its mean on the support, 0 elsewhere.

    Shapes: p, gradient [... n] -> the same.
    Source: Martins and Astudillo 2016 (arXiv 1602.02068), eq. 14.
    """
    support = p > 0
    inside = torch.where(support, gradient, 0)
    mean = inside.sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp_(min=1)
    # Outside the support p is 0, or NaN in a row without an answer.
    return torch.where(support, gradient - mean, p)


@dispatch.bfloat16_in_float32
def _forward(x: Tensor) -> Tensor:
    if x.dtype not in dispatch.CODES or x.dim() == 0:
        dispatch.checked(contract, x)
    kernels = dispatch.kernels_for(x)
    if kernels is not None:
        x = x.contiguous()
        p = torch.empty_like(x)
        n = x.shape[-1]
        dispatch.run_kernel(kernels, "sparsemax", (x, p), x.numel() // n, (n,), work=n)
        return p
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return project(x.to(dispatch.wide(x.dtype))).to(x.dtype).contiguous()


def _backward(gradient: Tensor, p: Tensor) -> Tensor:
    half, computed = p.dtype, dispatch.wide(p.dtype)
    if half is not computed:
        p, gradient = p.to(computed), gradient.to(computed)
    p, gradient = p.contiguous(), gradient.contiguous()
    kernels = dispatch.kernels_for(p)
    if kernels is None:
        return support_rule(p, gradient).to(half)
    out = torch.empty_like(p)
    n = p.shape[-1]
    buffers = (p, gradient, out)
    dispatch.run_kernel(kernels, "sparsemax_backward", buffers, p.numel() // n, (n,), work=n)
    return out if half is computed else out.to(half)


def _fake(x: Tensor) -> Tensor:
    (shape,) = dispatch.checked(contract, x)
    return x.new_empty(shape)


OPERATOR = dispatch.define("sparsemax", dispatch.schema(contract), _forward, _fake)
BACKWARD = dispatch.define(
    "sparsemax_backward",
    "(Tensor gradient, Tensor p) -> Tensor",
    _backward,
    lambda gradient, p: p.new_empty(p.shape),
)


def _keeping(run: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    p = run(OPERATOR, x)
    return p, (p,)


# The Jacobian is symmetric and locally constant, so its own gradient is the same rule.
derivatives.differentiate(OPERATOR, BACKWARD, _keeping)
dispatch.in_float32_under_autocast(OPERATOR)
derivatives.differentiate(
    BACKWARD,
    BACKWARD,
    lambda run, gradient, p: (run(BACKWARD, gradient, p), (p,)),
)


def sparsemax(z: Tensor, axis: int = -1) -> Tensor:
    """Project each slice along `axis` onto the simplex.

    Shapes: z [... n ...] -> the same.
    Raises: ShapeError if z has no axis `axis`, SaccadeError for another type.
    Source: Martins and Astudillo 2016 (arXiv 1602.02068), Algorithm 1.
    """
    rank = z.dim()
    if axis in (-1, rank - 1) and rank:
        return dispatch.call(OPERATOR, z)
    if not -rank <= axis < rank:
        raise ShapeError(
            f"{contract.name}: axis is {axis}, expected one of the {rank} axes of X "
            f"{list(z.shape)}."
        )
    return dispatch.call(OPERATOR, z.movedim(axis, -1)).movedim(-1, axis)
