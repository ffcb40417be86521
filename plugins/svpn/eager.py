# SPDX-License-Identifier: Apache-2.0
"""SvPN in torch: operator, gradient through the SVD, and an implementation without kernels."""

import math

import torch
from torch import Tensor

from saccade.plugins import derivatives, dispatch
from saccade.plugins.svpn.contract import RANK_THRESHOLD
from saccade.plugins.svpn.contract import svpn as contract

_COST = 16  # per element, in elements of sparsemax


def _decomposed(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the thin SVD, with singular values that count as 0 set to 0, and finite matrices.

    Shapes: q [... m n] -> u [... m k], s [... k], vh [... k n], finite [... 1 1].
    """
    finite = q.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(q.masked_fill(~finite, 0), full_matrices=False)
    least = RANK_THRESHOLD[dispatch.name_of(q.dtype)]
    return u, s.masked_fill(s <= least * s[..., :1], 0), vh, finite


def _power(s: Tensor, alpha: float) -> Tensor:
    return torch.where(s > 0, s**alpha, 0)


@dispatch.bfloat16_in_float32
def _forward(q: Tensor, alpha: float) -> Tensor:
    dispatch.checked(contract, q, alpha=alpha)
    kernels = dispatch.kernels_for(q)
    m, n = q.shape[-2:]
    if kernels is not None:
        q = q.contiguous()
        y = torch.empty_like(q)
        count, work = math.prod(q.shape[:-2]), m * n * min(m, n) * _COST
        dispatch.run_kernel(kernels, "svpn", (q, y), count, (m, n, alpha), work=work)
        return y
    if q.numel() == 0:
        return q.new_empty(q.shape)
    u, s, vh, finite = _decomposed(q.to(dispatch.wide(q.dtype)))
    y = (u * _power(s, alpha)[..., None, :]) @ vh
    return y.masked_fill(~finite, torch.nan).to(q.dtype).contiguous()


def _slopes(s: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the divided differences (f_i - f_j) / (s_i - s_j) and (f_i + f_j) / (s_i + s_j).

    Here f = s^alpha. They are exact for equal or nearly equal values. If both values are 0, the
    slope is unbounded and the result is 0.

    Shapes: s [... k] -> [... k k] each.
    """
    here, there = s[..., :, None], s[..., None, :]
    larger = torch.maximum(here, there)
    some = larger > 0
    safe = torch.where(some, larger, 1)
    ratio = torch.where(some, _power(safe, alpha) / safe, 0)
    apart = (here - there).abs() / safe
    # 1 - (1 - d)^alpha without cancellation; alpha d where d is 0.
    fall = -torch.expm1(alpha * torch.log1p(-apart))
    difference = ratio * torch.where(apart > 0, fall / torch.where(apart > 0, apart, 1), alpha)
    total = torch.where(some, here + there, 1)
    return difference, (_power(here, alpha) + _power(there, alpha)) / total


def _backward(gradient: Tensor, q: Tensor, alpha: float) -> Tensor:
    if q.numel() == 0:
        return q.new_empty(q.shape)
    computed = dispatch.wide(q.dtype)
    u, s, vh, finite = _decomposed(q.to(computed))
    g = gradient.to(computed)
    left, right = u.mT @ g, g @ vh.mT
    core = left @ vh.mT
    difference, mean = _slopes(s, alpha)
    symmetric, skew = (core + core.mT) / 2, (core - core.mT) / 2
    out = u @ (difference * symmetric + mean * skew) @ vh
    # The part outside the spans of u and v only rotates singular vectors; its factor is f(s) / s.
    turn = torch.where(s > 0, _power(s, alpha) / torch.where(s > 0, s, 1), 0)
    out = out + ((right - u @ core) * turn[..., None, :]) @ vh
    out = out + (u * turn[..., None, :]) @ (left - core @ vh)
    return out.masked_fill(~finite, torch.nan).to(q.dtype).contiguous()


def _fake(q: Tensor, alpha: float) -> Tensor:
    (shape,) = dispatch.checked(contract, q, alpha=alpha)
    return q.new_empty(shape)


OPERATOR = dispatch.define("svpn", dispatch.schema(contract), _forward, _fake)
BACKWARD = dispatch.define(
    "svpn_backward",
    "(Tensor gradient, Tensor q, float alpha) -> Tensor",
    _backward,
    lambda gradient, q, alpha: q.new_empty(q.shape),
)


# The Jacobian is symmetric: Y is the gradient of the sum of s^(alpha + 1) / (alpha + 1).
derivatives.differentiate(
    OPERATOR,
    BACKWARD,
    lambda run, q, alpha: (run(OPERATOR, q, alpha), (q,)),
    numbers=True,
)
derivatives.refuse(BACKWARD, tensors=2)
dispatch.in_float32_under_autocast(OPERATOR)


def svpn(q: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Raise singular values to the power alpha.

    Shapes: q [... m n] -> the same.
    Raises: ShapeError, SaccadeError (alpha outside (0, 1], another type).
    Source: Xie et al. 2021 (SoT), eq. 5; gradient: supplement C, by divided differences.
    """
    return dispatch.call(OPERATOR, q, *dispatch.attributes(contract, alpha=alpha))
