# SPDX-License-Identifier: Apache-2.0
"""Compute matrix products in half precision and everything between them in float32."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_PRODUCTS = frozenset(
    [
        *("matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "einsum", "linear"),
        *("conv1d", "conv2d", "conv_transpose2d"),
    ]
)


def float32_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose products stay in float32: read-outs and recurrent layers.

    Read-outs are modules named `head` and modules whose class sets `float32_products = True`.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "head"
        or getattr(module, "float32_products", False)
        or isinstance(module, nn.RNNBase | nn.RNNCellBase)
    }


def half_products(model: nn.Module, precision: str, *, accumulate: bool) -> "HalfProducts":
    """Return a `HalfProducts` for calls of a model; inside its `float32_modules` it is inactive.

    The hooks on them stay, so the mode can be entered any number of times.
    """
    mode = HalfProducts(precision, accumulate=accumulate)
    for module in float32_modules(model).values():
        module.register_forward_pre_hook(mode.leave)
        module.register_forward_hook(mode.enter)
    return mode


class HalfProducts(TorchFunctionMode):
    """While active, products of float32 matrices have operands and results of a half type.

    Softmax, normalizations, custom ops, residual sums and recurrent layers stay in float32: they
    are sensitive to rounding and take little time. With `accumulate`, the operands are rounded,
    multiplied and summed in float32, and the result is rounded, as the matrix units of a GPU do.
    Without it, the products are computed in the half type itself, as an exported graph has to
    express them. In both cases a number beyond the type's range becomes infinite.
    """

    def __init__(self, precision: str, *, accumulate: bool) -> None:
        super().__init__()
        self.dtype = HALF_TYPES[precision]
        self.accumulate = accumulate
        self.outside = 0  # number of nested read-outs being computed

    def __enter__(self) -> "HalfProducts":
        self.outside = 0  # a read-out that raised has not decreased it
        super().__enter__()
        return self

    def leave(self, *_: Any) -> None:
        """Compute products in float32 from here on."""
        self.outside += 1

    def enter(self, *_: Any) -> None:
        """Compute products in the half type again."""
        self.outside -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if self.outside:
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._attention(*args, **kwargs)
        if name not in _PRODUCTS:
            return func(*args, **kwargs)
        if name == "addmm_":
            result = self._product(torch.addmm, args, kwargs)
            return args[0].copy_(result)
        return self._product(func, args, kwargs)

    def _product(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        result = func(
            *(self._operand(argument) for argument in args),
            **{name: self._operand(argument) for name, argument in kwargs.items()},
        )
        return (result.to(self.dtype) if self.accumulate else result).float()

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        rounded = value.to(self.dtype)
        return rounded.float() if self.accumulate else rounded

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Compute attention as two products with a softmax in float32 between them."""
        assert dropout_p == 0 and not is_causal
        assert attn_mask is None or attn_mask.is_floating_point()
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = self._product(torch.matmul, (query * scale, key.mT), {})
        if attn_mask is not None:
            scores = scores + attn_mask
        return self._product(torch.matmul, (scores.softmax(-1), value), {})
