# SPDX-License-Identifier: Apache-2.0
"""Sums in a fixed order and functions by IEEE operations: the same numbers on every CPU.

A BLAS, a vectorized sum and a vectorized exponential choose their order and polynomials by the
CPU. This module uses only additions, multiplications, divisions and square roots. Each is rounded
as IEEE 754 requires and never fused with the next; their order depends on shapes alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Array = np.ndarray
_BLOCK = 2**14  # numbers of a product summed at a time, so that they stay in the cache
_LN2_HIGH, _LN2_LOW = 2977044471 / 2**32, 1.9082149292705877e-10  # log 2: 32 bits, the rest
_QUARTER = (6746518852 / 2**32, 2242054355 / 2**65, 2.0222662487959506e-21)  # pi / 2 likewise
_SERIES, _FRACTION = 40, 60  # terms; more do not change a bit on their side of 2


class FixedOrder(TorchDispatchMode):
    """While active, torch's float32 and float64 results on a CPU do not depend on the CPU model.

    For constants that are computed once: products take five times as long as with a BLAS on one
    core. `others` collects the operators called that are neither exact nor replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.others: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        fixed = _FIXED.get(func) if _plain(args) else None
        result = NotImplemented if fixed is None else fixed(*args, **options)
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        exact = name in _EXACT and options.get("alpha", 1) == 1
        if not exact and any(tensor.is_floating_point() for tensor in _tensors(args)):
            self.others.add(name)
        return func(*args, **options)


def product(a: Array, b: Array) -> Array:
    """Return the matrix product, summing from the first term to the last.

    Shapes: a [... m k], b [... k n] -> [... m n], leading axes equal.
    """
    if a.ndim > 2:
        return np.stack([product(*pair) for pair in zip(a, b, strict=True)])
    if b.shape[1] < a.shape[0]:  # the longer axis goes inside; no sum changes
        return np.ascontiguousarray(product(b.T, a.T).T)
    b = np.ascontiguousarray(b)
    out = np.zeros((len(a), b.shape[1]), np.result_type(a, b))
    rows = max(1, _BLOCK // max(1, b.shape[1]))
    for start in range(0, len(a), rows):
        block, columns = out[start : start + rows], a[start : start + rows].T[..., None]
        term = np.empty_like(block)
        for column, row in zip(columns, b, strict=True):
            np.multiply(column, row, out=term)
            np.add(block, term, out=block)
    return out


def total(x: Array) -> Array:
    """Sum over the first axis, adding halves to each other until one row is left.

    Shapes: x [k ...] -> [...].
    """
    if not len(x):
        return np.zeros_like(x, shape=x.shape[1:])
    while len(x) > 1:
        half = len(x) // 2
        x = np.concatenate((x[:half] + x[half : 2 * half], x[2 * half :]))
    return x[0]


def exponential(x: Array) -> Array:
    """Return e^x, within two units in the last place.

    Source: x = k log 2 + r, then the series of e^r for |r| <= log(2) / 2.
    """
    x = np.clip(x, -1100, 1100)
    k = np.rint(x / (_LN2_HIGH + _LN2_LOW))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = np.ones_like(r)
    for n in range(14, 0, -1):
        series = 1 + series * r / n
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(series, k.astype(np.int32))


def sine(x: Array, quarters: int = 0) -> Array:
    """Return sin(x + quarters pi / 2) within 1e-15, for |x| up to a million.

    Source: x = k pi / 2 + r, then the series of sine or cosine for |r| <= pi / 4.
    """
    k = np.rint(x / (math.pi / 2))
    r = x
    for part in _QUARTER:
        r = r - k * part
    odd, even = np.ones_like(r), np.ones_like(r)
    for n in range(10, 0, -1):
        odd = 1 - odd * (r * r / (2 * n * (2 * n + 1)))
        even = 1 - even * (r * r / (2 * n * (2 * n - 1)))
    turn = (k.astype(np.int64) + quarters) % 4
    return np.where(turn % 2 == 0, odd * r, even) * np.where(turn < 2, 1.0, -1.0)


def power(base: float, exponents: Array) -> Array:
    """Return base^x for a positive base, rounded from 40 decimal digits: exact and slow.

    Shapes: exponents [...] -> [...].
    """
    with localcontext() as context:
        context.prec = 40
        powers = [
            float(Decimal(base) ** Decimal(exponent)) for exponent in exponents.ravel().tolist()
        ]
    return np.array(powers, exponents.dtype).reshape(exponents.shape)


def normal_cdf(x: Array) -> Array:
    """Return the share of the standard normal distribution below x, to 1e-16 of 1.

    Source: near 0 the series erf t = 2 t e^(-t^2) / sqrt(pi) sum_n (2 t^2)^n / (2n + 1)!!, beyond
            t = 2 Laplace's continued fraction of erfc.
    """
    t = np.abs(x) / math.sqrt(2)
    near, far = np.minimum(t, 2), np.clip(t, 2, 40)
    series, fraction = np.ones_like(t), np.zeros_like(t)
    for n in range(_SERIES, 0, -1):
        series = 1 + series * (2 * near * near / (2 * n + 1))
    for n in range(_FRACTION, 0, -1):
        fraction = (n / 2) / (far + fraction)
    within = near * exponential(-near * near) * series / math.sqrt(math.pi)  # erf(t) / 2
    beyond = exponential(-far * far) / (far + fraction) / (2 * math.sqrt(math.pi))
    tail = np.where(t < 2, 0.5 - within, beyond)
    centre = np.where(t < 2, 0.5 + within, 1 - beyond)
    return np.where(x < 0, tail, centre)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    return [value for value in args if isinstance(value, Tensor)]


def _plain(args: Sequence[Any]) -> bool:
    kinds = (torch.float32, torch.float64)
    return all(tensor.device.type == "cpu" and tensor.dtype in kinds for tensor in _tensors(args))


def _array(x: Tensor) -> Array:
    return x.detach().numpy()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(product(_array(a), _array(b)))


def _mv(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a, b[:, None])[:, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return _mm(a[None], b[:, None])[0, 0]


def _added(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return beta * c + alpha * multiply(a, b)

    return function


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dtype not in (None, x.dtype):
        return NotImplemented
    dims = [dim] if isinstance(dim, int) else dim
    axes = sorted(axis % max(1, x.dim()) for axis in (dims or range(x.dim())))
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    rows = _array(x.permute(*axes, *kept)).reshape(-1, *(x.shape[axis] for axis in kept))
    sums = torch.from_numpy(np.asarray(total(rows)))
    if keepdim:
        sums = sums.reshape([1 if i in axes else n for i, n in enumerate(x.shape)])
    return sums


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    total = _sum(x, dim, keepdim, dtype=dtype)
    return total if total is NotImplemented else total / (x.numel() / max(1, total.numel()))


def _norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if ord != 2:
        return NotImplemented
    squares = _sum(x * x, dim, keepdim, dtype=dtype)
    return squares if squares is NotImplemented else squares.sqrt()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(shape), 0))
    mean = _mean(x, dims, True)
    centred = x - mean
    rate = 1 / (_mean(centred * centred, dims, True) + eps).sqrt()
    out = centred * rate
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rate


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate != "none":
        return NotImplemented
    return x * torch.from_numpy(np.asarray(normal_cdf(_array(x))))


def _exp(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(exponential(_array(x))))


def _sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(sine(_array(x))))


def _cos(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(sine(_array(x), 1)))


def _power(base: float, exponents: Tensor) -> Tensor:
    return torch.from_numpy(power(base, _array(exponents))) if base > 0 else NotImplemented


def _square(x: Tensor, exponent: float) -> Tensor:
    return x * x if exponent == 2 else NotImplemented


def _rsqrt(x: Tensor) -> Tensor:
    return 1 / x.sqrt()


_ATEN = torch.ops.aten
_FIXED: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _mm,
    _ATEN.bmm.default: _mm,
    _ATEN.mv.default: _mv,
    _ATEN.dot.default: _dot,
    _ATEN.addmm.default: _added(_mm),
    _ATEN.baddbmm.default: _added(_mm),
    _ATEN.addmv.default: _added(_mv),
    _ATEN.sum.default: _sum,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.default: _mean,
    _ATEN.mean.dim: _mean,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN.gelu.default: _gelu,
    _ATEN.exp.default: _exp,
    _ATEN.sin.default: _sin,
    _ATEN.cos.default: _cos,
    _ATEN.pow.Scalar: _power,
    _ATEN.pow.Tensor_Scalar: _square,
    _ATEN.rsqrt.default: _rsqrt,
}
# At most one IEEE 754 rounding per number; and operators that fill weights overwritten later.
_NAMES = """
    add add_ sub sub_ rsub mul mul_ div div_ neg sqrt reciprocal abs maximum minimum clamp
    clamp_min clamp_max relu where eq ne lt le gt ge any all bitwise_or bitwise_and bitwise_not
    logical_or logical_and logical_not isfinite masked_fill
    copy_ _to_copy clone detach alias lift_fresh set_ view _unsafe_view _reshape_alias reshape
    unsqueeze squeeze squeeze_ t transpose permute expand repeat slice select index index_select
    narrow cat stack split split_with_sizes unbind chunk flatten unflatten diagonal
    empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros ones
    ones_like new_ones full full_like arange scalar_tensor fill_ zero_ _local_scalar_dense
    uniform_ normal_ linspace
"""
_EXACT = frozenset(_NAMES.split())
