# SPDX-License-Identifier: Apache-2.0
"""How a contract becomes a torch operator: schema, fake tensors, gradient, choice of kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.plugins.contract import DOMAIN, Op
from saccade.plugins.errors import SaccadeError
from saccade.plugins.native import bindings

_LIBRARY = torch.library.Library(DOMAIN, "FRAGMENT")
_NAMES = {getattr(torch, name): name for name in bindings.CODES}
CODES = {dtype: bindings.CODES[name] for dtype, name in _NAMES.items()}
# Overload -> what runs on ordinary tensors, and the same with its gradient.
_COMPUTE: dict[Any, Callable[..., Any]] = {}
_PLAIN: dict[Any, Callable[..., Any]] = {}
_ORDINARY = (Tensor, torch.nn.Parameter)


def name_of(dtype: torch.dtype) -> str:
    """The type as the contracts write it: `float32`."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that a tensor of type `dtype` is computed in."""
    return torch.float32 if dtype == torch.float16 else dtype


def checked(op: Op, *tensors: Tensor, **attributes: Any) -> tuple[tuple[Any, ...], ...]:
    """The output shapes, after a look at all that is known without reading a value.

    Raises: ShapeError, SaccadeError if an input or attribute does not fit the contract.
    """
    for port, tensor in zip(op.inputs, tensors, strict=True):
        op.checked_dtype(port, name_of(tensor.dtype))
        expected = tensors[0].dtype if port.dtype == "T" else tensor.dtype
        if tensor.device != tensors[0].device or tensor.dtype != expected:
            raise SaccadeError(
                f"{op.name}: input {port.name} is {name_of(tensor.dtype)} on {tensor.device}, "
                f"input {op.inputs[0].name} is {name_of(tensors[0].dtype)} on "
                f"{tensors[0].device}. Move one with .to()."
            )
    op.defaults(attributes)
    return op.output_shapes(*(tensor.shape for tensor in tensors))


def attributes(op: Op, **given: Any) -> tuple[Any, ...]:
    """The attributes in the node's order, of their declared types.

    Raises: SaccadeError for a value out of its range; a compiled call is checked by its operator.
    """
    return tuple(given.values() if torch.compiler.is_compiling() else op.defaults(given).values())


def kernels_for(tensor: Tensor) -> bindings.Kernels | None:
    """The native kernels, where they are built and the tensor is on the CPU and holds something."""
    return bindings.kernels() if tensor.is_cpu and tensor.numel() else None


def schema(op: Op) -> str:
    """Inputs and attributes of the node, in its order: `(Tensor z, float lam) -> Tensor`."""
    inputs = [f"Tensor {port.name.lower()}" for port in op.inputs]
    inputs += [f"{each.kind.__name__} {each.name}" for each in op.attributes.values()]
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join(inputs)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def define(name: str, signature: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `saccade::name` on every device, without a gradient; returns the overload."""
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{name}", fake, lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, DOMAIN), name).default
    _COMPUTE[operator] = compute
    return operator


def _is_plain_call(tensor: Tensor) -> bool:
    """Whether nobody looks on: no mode, transform, tracer or profiler, and an ordinary tensor."""
    return (
        type(tensor) in _ORDINARY
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._ops._len_torch_dispatch_stack_pre_dispatch()
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
    )


def call(operator: Any, *arguments: Any) -> Any:
    """The operator; a plain call goes past the dispatcher, whose way through Python is long."""
    if not torch.compiler.is_compiling() and _is_plain_call(arguments[0]):
        return _PLAIN[operator](*arguments)
    return operator(*arguments)


def _compute(operator: Any, *arguments: Any) -> Any:
    return _COMPUTE[operator](*arguments)


def _redispatch(operator: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def differentiate(
    operator: Any,
    rule: Any,
    keeping: Callable[..., tuple[Any, Sequence[Tensor]]],
    *,
    inputs: int = 1,
    constant: Sequence[int] = (),
    twice: bool = False,
) -> None:
    """Gives an operator its gradient: torch.library.register_autograd with half its overhead.

    `keeping(run, *arguments)` -> (answer, tensors to keep), where `run(operator, *arguments)` is
    an operator without its gradient. `rule` is the operator that takes the gradient of the first
    answer, what was kept and the arguments that are no tensors, and gives the gradients of the
    first `inputs` arguments. `constant` numbers the answers that have no gradient; `twice` says
    that `rule` has a gradient itself and takes no numbers.
    """
    name = operator._schema.name

    def chooser(run: Callable[..., Any]) -> Callable[..., Any]:
        function = _function(name, rule, keeping, run, inputs, constant, twice)

        def choose(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments[:inputs]):
                return function.apply(*arguments)
            return run(operator, *arguments)

        return choose

    _LIBRARY.impl(name.removeprefix(f"{DOMAIN}::"), chooser(_redispatch), "Autograd")
    _PLAIN[operator] = chooser(_compute)


def _function(
    name: str,
    rule: Any,
    keeping: Callable[..., tuple[Any, Sequence[Tensor]]],
    run: Callable[..., Any],
    inputs: int,
    constant: Sequence[int],
    twice: bool,
) -> Any:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            answer, kept = keeping(run, *arguments)
            ctx.save_for_backward(*kept)
            ctx.rest = (None,) * (len(arguments) - inputs)
            if not twice:
                ctx.numbers = arguments[inputs:]
            if constant:
                ctx.mark_non_differentiable(*(answer[i] for i in constant))
            return answer

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
            if not torch.is_grad_enabled():
                plain = type(gradient) in _ORDINARY and not torch._C._len_torch_dispatch_stack()
                numbers = () if twice else ctx.numbers
                found = (run if plain else _redispatch)(
                    rule, gradient, *ctx.saved_tensors, *numbers
                )
            elif twice:
                found = rule(gradient, *ctx.saved_tensors)
            else:
                raise SaccadeError(
                    f"{name}: found create_graph=True, expected False: its gradient has no "
                    "gradient. Call backward() without it, or detach() what goes in."
                )
            return (found, *ctx.rest) if inputs == 1 else (*found, *ctx.rest)

    return Differentiable
