# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax in torch: operators, gradient, implementation without kernels."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.plugins import derivatives, dispatch
from saccade.plugins.contract import Op
from saccade.plugins.sparsemax.eager import support_rule
from saccade.plugins.tvmax import dual
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE
from saccade.plugins.tvmax.contract import masked_tvmax as masked_contract
from saccade.plugins.tvmax.contract import tvmax as contract

Answer = tuple[Tensor, Tensor, Tensor]
_COST = 256  # per cell, in elements of sparsemax


class ToleranceWarning(RuntimeWarning):
    """Some grids did not converge within max_iterations; `error` has their bounds."""


@dispatch.bfloat16_in_float32
def _solved(
    z: Tensor,
    sizes: Tensor | None,
    *attributes: Any,
    groups: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute weights, bound and (optionally) groups, with the kernel or in torch."""
    op, inputs = _contract_of(sizes)
    dispatch.checked(op, z, *inputs, **dict(zip(op.attributes, attributes, strict=True)))
    _check_sizes(z, sizes)
    kernels = dispatch.kernels_for(z)
    z = z.contiguous()
    p, error, labels = (
        _torch_form(z, sizes, *attributes)
        if kernels is None
        else _by_kernel(kernels, z, sizes, attributes, groups)
    )
    _, tolerance, max_iterations = attributes
    warn_above(error, tolerance, max_iterations, op.name, z.dtype)
    return p, error, labels


def _two_of(z: Tensor, sizes: Tensor | None, *attributes: Any) -> tuple[Tensor, Tensor]:
    p, error, _ = _solved(z, sizes, *attributes, groups=False)
    return p, error


def _contract_of(sizes: Tensor | None) -> tuple[Op, list[Tensor]]:
    return (contract, []) if sizes is None else (masked_contract, [sizes])


def _check_sizes(z: Tensor, sizes: Tensor | None) -> None:
    if sizes is None:
        return
    h, w = z.shape[-2:]
    flat = sizes.reshape(-1, 2)
    wrong = ((flat < 0) | (flat > flat.new_tensor([h, w]))).any(1)
    if bool(wrong.any()):
        raise SaccadeError(
            f"{masked_contract.name}: sizes has {flat[wrong][0].tolist()}, expected 0 to {h} rows "
            f"and 0 to {w} columns. Pass height and width of the included part of each grid."
        )


def _by_kernel(
    kernels: Any,
    z: Tensor,
    sizes: Tensor | None,
    attributes: tuple[Any, ...],
    groups: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    h, w = z.shape[-2:]
    sizes = None if sizes is None else sizes.contiguous()
    p = torch.empty_like(z)
    error = z.new_empty(z.shape[:-2], dtype=torch.float32)
    labels = torch.empty_like(z, dtype=torch.int32) if groups else None
    buffers, work = (z, sizes, p, error, labels), h * w * _COST
    dispatch.run_kernel(kernels, "tvmax", buffers, error.numel(), (h, w, *attributes), work=work)
    return p, error, labels


def _torch_form(
    z: Tensor, sizes: Tensor | None, lam: float, tolerance: float, max_iterations: int
) -> Answer:
    h, w = z.shape[-2:]
    leading = z.shape[:-2]
    count = math.prod(leading)
    if z.numel() == 0:
        return z.new_empty(z.shape), z.new_zeros(leading, dtype=torch.float32), z.int()
    inside = torch.ones(count, h, w, dtype=torch.bool, device=z.device)
    if sizes is not None:
        rows, columns = sizes.reshape(-1, 2, 1, 1).unbind(1)
        inside &= torch.arange(h, device=z.device)[:, None] < rows
        inside &= torch.arange(w, device=z.device) < columns
    p, error, groups = dual.solve(
        z.reshape(count, h * w),
        inside.view(count, h * w),
        dual.grid_edges(h, w, z.device),
        lam,
        tolerance,
        max_iterations,
    )
    return p.to(z.dtype).view(z.shape), error.float().view(leading), groups.view(z.shape)


def warn_above(
    error: Tensor, tolerance: float, max_iterations: int, name: str, dtype: torch.dtype
) -> None:
    """Warn if a bound is too large; by default Python shows the warning once per process."""
    if dtype != torch.float64:
        tolerance = max(tolerance, SMALLEST_FLOAT32_TOLERANCE)
    if bool((error > tolerance).any()):
        warnings.warn(
            f"{name}: after max_iterations={max_iterations}, some grids may be more than "
            f"{tolerance:g} from the answer; `error` has the bounds. Raise max_iterations or the "
            "tolerance.",
            ToleranceWarning,
            stacklevel=2,
        )


def _backward(gradient: Tensor, p: Tensor, groups: Tensor) -> Tensor:
    """Compute the gradient of the logits.

    Shapes: p, groups [... n], gradient with the same cells in any shape -> as gradient.
    """
    shape, given, computed = gradient.shape, p.dtype, dispatch.wide(p.dtype)
    p, gradient = p.to(computed).contiguous(), gradient.to(computed).reshape(p.shape).contiguous()
    groups = groups.contiguous()
    cells = p.shape[-1]
    kernels = dispatch.kernels_for(p)
    if kernels is None:
        return _group_rule(p, groups, gradient).to(given).view(shape)
    out = torch.empty_like(p)
    buffers, grids = (p, groups, gradient, out), p.numel() // cells
    dispatch.run_kernel(kernels, "tvmax_backward", buffers, grids, (cells,), work=cells)
    return out.to(given).view(shape)


def _group_rule(p: Tensor, groups: Tensor, gradient: Tensor) -> Tensor:
    """Apply sparsemax's rule, then average each group.

    Shapes: p, groups, gradient [... n] -> the same.
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), Algorithm 1.
    """
    part = groups >= 0
    at = groups.clamp(min=0).long()
    given = support_rule(p, gradient).masked_fill(~part, 0)
    total = torch.zeros_like(p).scatter_add_(-1, at, given)
    size = torch.zeros_like(p).scatter_add_(-1, at, part.to(p.dtype))
    return (total / size.clamp_(min=1)).gather(-1, at).masked_fill(~part, 0)


def _fake(op: Op, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tensors = [argument for argument in rest if isinstance(argument, Tensor)]
    attributes = dict(zip(op.attributes, rest[len(tensors) :], strict=True))
    p, error = dispatch.checked(op, z, *tensors, **attributes)
    return z.new_empty(p), z.new_empty(error, dtype=torch.float32)


def _fake_with_groups(z: Tensor, sizes: Tensor | None, *attributes: Any) -> Answer:
    op, inputs = _contract_of(sizes)
    p, error = _fake(op, z, *inputs, *attributes)
    return p, error, z.new_empty(z.shape, dtype=torch.int32)


OPERATOR = dispatch.define(
    "tvmax",
    dispatch.schema(contract),
    lambda z, *attributes: _two_of(z, None, *attributes),
    lambda *arguments: _fake(contract, *arguments),
)
MASKED_OPERATOR = dispatch.define(
    "masked_tvmax",
    dispatch.schema(masked_contract),
    _two_of,
    lambda *arguments: _fake(masked_contract, *arguments),
)
# Used instead of the two operators if a gradient is needed: the backward pass needs the groups. It
# has a gradient too, for a second transform around the first.
WITH_GROUPS = dispatch.define(
    "tvmax_with_groups",
    "(Tensor z, Tensor? sizes, float lam, float tolerance, int max_iterations)"
    " -> (Tensor, Tensor, Tensor)",
    _solved,
    _fake_with_groups,
)
BACKWARD = dispatch.define(
    "tvmax_backward",
    "(Tensor gradient, Tensor p, Tensor groups) -> Tensor",
    _backward,
    lambda gradient, p, groups: p.new_empty(gradient.shape),
)


def _keeping(
    run: Any, z: Tensor, sizes: Tensor | None, *attributes: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    p, error, groups = run(WITH_GROUPS, z, sizes, *attributes)
    return (p, error, groups), (p.flatten(-2), groups.flatten(-2))


def _keeping_two(run: Any, z: Tensor, *rest: Any) -> tuple[Any, tuple[Tensor, ...]]:
    (p, error, _), kept = _keeping(run, z, *rest)
    return (p, error), kept


derivatives.differentiate(
    OPERATOR,
    BACKWARD,
    lambda run, z, *rest: _keeping_two(run, z, None, *rest),
    constant=(1,),
)
derivatives.differentiate(MASKED_OPERATOR, BACKWARD, _keeping_two, constant=(1,))
derivatives.differentiate(WITH_GROUPS, BACKWARD, _keeping, constant=(1, 2))
# The support is a union of groups, so the Jacobian is symmetric and its gradient the same rule.
derivatives.differentiate(
    BACKWARD,
    BACKWARD,
    lambda run, *arguments: (run(BACKWARD, *arguments), arguments[1:]),
)
for operator in (OPERATOR, MASKED_OPERATOR):
    dispatch.in_float32_under_autocast(operator)


def tvmax(
    z: Tensor, *, lam: float = 0.01, tolerance: float = 1e-6, max_iterations: int = 2000
) -> tuple[Tensor, Tensor]:
    """Compute sparse attention over a grid that favors equal neighbors, and its error bound.

    Shapes: z [... h w] -> p [... h w], error [...] float32 (without a gradient).
    Raises: ShapeError, SaccadeError (an attribute out of its range, another type).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 6.
    """
    values = dispatch.attributes(
        contract, lam=lam, tolerance=tolerance, max_iterations=max_iterations
    )
    return dispatch.call(OPERATOR, z, *values)


def masked_tvmax(
    z: Tensor,
    sizes: Any,
    *,
    lam: float = 0.01,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
) -> tuple[Tensor, Tensor]:
    """Compute TVMax of the top-left part of each grid, and 0 elsewhere.

    Shapes: z [... h w], sizes [... 2] (height, width) -> p [... h w], error [...] float32.
    Raises: ShapeError, SaccadeError (sizes that do not fit, an attribute, another type).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 6.
    """
    values = dispatch.attributes(
        masked_contract, lam=lam, tolerance=tolerance, max_iterations=max_iterations
    )
    return dispatch.call(MASKED_OPERATOR, z, torch.as_tensor(sizes, device=z.device), *values)
