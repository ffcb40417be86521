# SPDX-License-Identifier: Apache-2.0
"""Models with names, shapes and types, but without memory for any number, or without drawing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext


def _in_place(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _within_bounds(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    # `trunc_normal_` draws again until all numbers are within its bounds: memory may contain any.
    return tensor.zero_()


def _drawn(*size: Any, generator: Any = None, **keywords: Any) -> Tensor:
    return torch.empty(*size, **keywords)


def _arange(*ends: Any, dtype: Any = None, **keywords: Any) -> Tensor:
    start, end, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1)[:3]
    if dtype is None and all(isinstance(end, int) for end in ends):
        dtype = torch.int64
    return torch.empty(max(0, -int(-(end - start) // step)), dtype=dtype, **keywords)


def _linspace(start: Any, end: Any, steps: int, **keywords: Any) -> Tensor:
    return torch.empty(steps, **keywords)


def _full(size: Sequence[int], value: Any, *, dtype: Any = None, **keywords: Any) -> Tensor:
    return torch.empty(size, dtype=dtype or torch.tensor(value).dtype, **keywords)


def _scaled(a: Any, b: Any) -> Tensor:
    shapes = [x.shape if isinstance(x, Tensor) else () for x in (a, b)]
    return torch.empty(np.broadcast_shapes(*shapes), dtype=torch.result_type(a, b))


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype)


_DRAWING: Mapping[Any, Callable[..., Tensor]] = {
    torch.nn.init.normal_: _in_place,
    torch.nn.init.uniform_: _in_place,
    torch.nn.init.kaiming_uniform_: _in_place,
    Tensor.normal_: _within_bounds,
    Tensor.uniform_: _in_place,
    torch.rand: _drawn,
    torch.randn: _drawn,
}
# What the meta device computes in Python, for which it imports torch's compiler and sympy: seconds
# per process. Other functions than these are left to it.
_SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    **_DRAWING,
    Tensor.triu: _in_place,
    torch.triu: _in_place,
    torch.arange: _arange,
    torch.linspace: _linspace,
    torch.full: _full,
    Tensor.mul: _scaled,
    Tensor.__mul__: _scaled,
    Tensor.__rmul__: _scaled,
    torch.stack: _stack,
}


class Undrawn(TorchFunctionMode):
    """Inside the block, random tensors have any values: their memory is not touched.

    It costs neither memory nor time to build a model whose weights are replaced next.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        return _DRAWING.get(function, function)(*arguments, **(keywords or {}))


class ShapesOnly(TorchFunctionMode):
    """Inside the block, tensors are created on the meta device, of equal shapes and types."""

    def __init__(self) -> None:
        super().__init__()
        self._device = DeviceContext(torch.device("meta"))

    def __enter__(self) -> "ShapesOnly":
        self._device.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        self._device.__exit__(*ended)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        values = [*arguments, *keywords.values()]
        if function is torch.stack:
            values += arguments[0]
        if all(value.is_meta for value in values if isinstance(value, Tensor)):
            function = _SHAPES.get(function, function)
        return function(*arguments, **keywords)
