# SPDX-License-Identifier: Apache-2.0
"""SvPNFast in torch: operator, gradient through the iteration, implementation without kernels."""

import math
from typing import Any

import torch
from torch import Tensor

from saccade.plugins import derivatives, dispatch
from saccade.plugins.svpn_fast.contract import SMALLEST_NORM
from saccade.plugins.svpn_fast.contract import svpn_fast as contract

_COST = 4  # per element, in elements of sparsemax


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-2, eps=SMALLEST_NORM)


def _power(s: Tensor, exponent: float) -> Tensor:
    """Compute a power of s, with slope 0 instead of infinity where s is 0."""
    positive = s > 0
    return torch.where(positive, torch.where(positive, s, 1) ** exponent, float(exponent == 0))


def _plain(
    q: Tensor, v0: Tensor, alpha: float, singular_values: int, iterations: int, epsilon: float
) -> Tensor:
    """Run the iteration in operations that torch can differentiate.

    Shapes: q [... m n], v0 [n], optionally with leading axes of q -> as q.
    """
    rest, total = q, torch.zeros_like(q)
    between = (1,) * (q.dim() - 1 - v0.dim())
    start = v0.reshape(*v0.shape[:-1], *between, v0.shape[-1], 1)
    s = q.new_zeros(())
    for _ in range(singular_values or min(q.shape[-2:])):
        v = start
        for _ in range(iterations):
            u = _unit(rest @ v)
            v = _unit(rest.mT @ u)
        s = (u.mT @ rest @ v).clamp(min=0)
        outer = u @ v.mT
        total = total + _power(s, alpha) * outer
        rest = rest - s * outer
    if singular_values == 0:
        return total
    divisor = _power(s, 1 - alpha) + epsilon
    return total + torch.where(divisor > 0, rest / torch.where(divisor > 0, divisor, 1), 0)


@dispatch.bfloat16_in_float32
def _forward(q: Tensor, v0: Tensor, *numbers: Any) -> Tensor:
    dispatch.checked(contract, q, v0, **dict(zip(contract.attributes, numbers, strict=True)))
    kernels = dispatch.kernels_for(q)
    if kernels is not None:
        q, v0 = q.contiguous(), v0.contiguous()
        y = torch.empty_like(q)
        m, n = q.shape[-2:]
        _, singular_values, iterations, _ = numbers
        work = m * n * (singular_values or min(m, n)) * iterations * _COST
        buffers, count = (q, v0, y), math.prod(q.shape[:-2])
        given = (m, n, *numbers)
        dispatch.run_kernel(kernels, "svpn_fast", buffers, count, given, work=work, shared=(1,))
        return y
    if q.numel() == 0:
        return q.new_empty(q.shape)
    computed = dispatch.wide(q.dtype)
    return _plain(q.to(computed), v0.to(computed), *numbers).to(q.dtype).contiguous()


def _differentiable(q: Tensor, v0: Tensor, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and v0 in the type of the computation, and the answer as a function of them."""
    computed = dispatch.wide(q.dtype)
    # Inside an operator, autograd is disabled; here it does the computation.
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        q, v0 = (tensor.detach().to(computed).requires_grad_() for tensor in (q, v0))
        return q, v0, _plain(q, v0, *numbers)


def _backward(gradient: Tensor, q: Tensor, v0: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(v0)
    wide_q, wide_v0, y = _differentiable(q, v0, *numbers)
    gradients = torch.autograd.grad(y, [wide_q, wide_v0], gradient.to(y.dtype))
    return gradients[0].to(q.dtype).contiguous(), gradients[1].to(q.dtype).contiguous()


def _along(moved_q: Tensor, moved_v0: Tensor, q: Tensor, v0: Tensor, *numbers: Any) -> Tensor:
    """Compute the answer's tangent as the transpose of the gradient's linear map."""
    if q.numel() == 0:
        return torch.zeros_like(q)
    key = torch._C.DispatchKey.AutogradFunctionality
    wide_q, wide_v0, y = _differentiable(q, v0, *numbers)
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        cotangent = torch.zeros_like(y, requires_grad=True)
        pulled = torch.autograd.grad(y, [wide_q, wide_v0], cotangent, create_graph=True)
        moved = (moved_q.to(y.dtype), moved_v0.to(y.dtype))
        (tangent,) = torch.autograd.grad(pulled, cotangent, moved)
    return tangent.to(q.dtype).contiguous()


def _fake(q: Tensor, v0: Tensor, *numbers: Any) -> Tensor:
    attributes = dict(zip(contract.attributes, numbers, strict=True))
    (shape,) = dispatch.checked(contract, q, v0, **attributes)
    return q.new_empty(shape)


OPERATOR = dispatch.define("svpn_fast", dispatch.schema(contract), _forward, _fake, shared=(1,))
BACKWARD = dispatch.define(
    "svpn_fast_backward",
    "(Tensor gradient, Tensor q, Tensor v0, float alpha, int singular_values, int iterations, "
    "float epsilon) -> (Tensor, Tensor)",
    _backward,
    lambda gradient, q, v0, *numbers: (q.new_empty(q.shape), v0.new_empty(v0.shape)),
)


ALONG = dispatch.define(
    "svpn_fast_along",
    "(Tensor moved_q, Tensor moved_v0, Tensor q, Tensor v0, float alpha, int singular_values, "
    "int iterations, float epsilon) -> Tensor",
    _along,
    lambda moved_q, moved_v0, q, *rest: q.new_empty(q.shape),
)

derivatives.differentiate(
    OPERATOR,
    BACKWARD,
    lambda run, q, v0, *numbers: (run(OPERATOR, q, v0, *numbers), (q, v0)),
    inputs=2,
    numbers=True,
    along=ALONG,
)
derivatives.refuse(BACKWARD, tensors=3)
derivatives.refuse(ALONG, tensors=4)
dispatch.in_float32_under_autocast(OPERATOR)


def svpn_fast(
    q: Tensor,
    v0: Tensor,
    *,
    alpha: float = 0.5,
    singular_values: int = 1,
    iterations: int = 1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Approximate SvPN by power iterations from v0: find the first values, scale the rest.

    Shapes: q [... m n], v0 [n] -> as q.
    Raises: ShapeError, SaccadeError (an attribute out of its range, another type).
    Source: Xie et al. 2021 (SoT), eq. 6 to 8; epsilon = 0 is eq. 8 with 0/0 = 0.
    """
    values = dispatch.attributes(
        contract,
        alpha=alpha,
        singular_values=singular_values,
        iterations=iterations,
        epsilon=epsilon,
    )
    return dispatch.call(OPERATOR, q, v0, *values)
