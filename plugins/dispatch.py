# SPDX-License-Identifier: Apache-2.0
"""Define the torch operator of a contract: schema, fake tensors, types, choice of kernels."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade.core.errors import SaccadeError
from saccade.plugins.contract import DOMAIN, Op
from saccade.plugins.contract import DTYPES as CONTRACT_DTYPES
from saccade.plugins.native import bindings

# The mapped axis of each argument, or None.
Axes = Sequence[int | None]


def add_batching_rule(library: Any, operator: Any, shared: Sequence[int] = ()) -> None:
    """Register the batching rules of an operator.

    `shared` has the indices of tensors without leading axes. If one of them is mapped over, the
    operator is called once per element.
    """

    def rule(info: Any, axes: Axes, *arguments: Any) -> tuple[Any, Any]:
        answer = _mapped(operator, info.batch_size, axes, arguments, shared)
        return answer, (0,) * len(answer) if isinstance(answer, tuple) else 0

    name = operator._schema.name
    torch.library.register_vmap(name, rule, lib=library)
    # Used by torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True).
    library.impl(name.rpartition("::")[2], _older_rule(operator, shared), "Batched")


def _mapped(
    operator: Any, size: int, axes: Axes, arguments: Sequence[Any], shared: Sequence[int]
) -> Any:
    """Return the answers of all `size` calls, stacked on a new first axis."""
    if any(axes[i] is not None for i in shared):
        return _one_by_one(operator, size, axes, arguments)
    front = []
    for i, (argument, axis) in enumerate(zip(arguments, axes, strict=True)):
        if axis is not None:
            argument = argument.movedim(axis, 0)
        elif isinstance(argument, Tensor) and i not in shared:
            argument = argument.expand(size, *argument.shape)
        front.append(argument)
    return operator(*front)


def _one_by_one(operator: Any, size: int, axes: Axes, arguments: Sequence[Any]) -> Any:
    answers = [
        operator(
            *(
                argument if axis is None else argument.select(axis, i)
                for argument, axis in zip(arguments, axes, strict=True)
            )
        )
        for i in range(size)
    ]
    if isinstance(answers[0], Tensor):
        return torch.stack(answers)
    return tuple(torch.stack(rows) for rows in zip(*answers, strict=True))


def _older_rule(operator: Any, shared: Sequence[int]) -> Callable[..., Any]:
    """Return the rule for torch's older batched tensors, which predate torch.func."""

    def run(*arguments: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        mapped = [_size_at(level, argument) for argument in arguments]
        while all(size is None for size in mapped):
            level -= 1
            mapped = [_size_at(level, argument) for argument in arguments]
        axes = [None if size is None else 0 for size in mapped]
        inside = [
            argument if size is None else torch._remove_batch_dim(argument, level, 1, 0)
            for argument, size in zip(arguments, mapped, strict=True)
        ]
        size = next(size for size in mapped if size is not None)
        answer = _mapped(operator, size, axes, inside, shared)
        if isinstance(answer, Tensor):
            return torch._add_batch_dim(answer, 0, level)
        return tuple(torch._add_batch_dim(tensor, 0, level) for tensor in answer)

    return run


def _size_at(level: int, argument: Any) -> int | None:
    """Return the length of the mapped axis at this level of nesting, or None."""
    if not isinstance(argument, Tensor):
        return None
    # A tensor without such an axis gets one of the given length.
    one, two = (torch._remove_batch_dim(argument, level, n, 0).shape[0] for n in (1, 2))
    return one if one == two else None


_LIBRARY = torch.library.Library(DOMAIN, "FRAGMENT")
_NAMES = {getattr(torch, name): name for name in bindings.CODES}
CODES = {dtype: bindings.CODES[name] for dtype, name in _NAMES.items()}
# torch supports one type more than the contract.
DTYPES = (*CONTRACT_DTYPES, "bfloat16")
# Overload -> the function on ordinary tensors, and the same with its gradient.
_COMPUTE: dict[Any, Callable[..., Any]] = {}
_PLAIN: dict[Any, Callable[..., Any]] = {}
_ORDINARY = (Tensor, torch.nn.Parameter)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type as in contracts, such as `float32`."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor of type `dtype` is computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def bfloat16_in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that bfloat16 inputs are computed in float32.

    No kernel reads bfloat16. The first answer is converted back.
    """

    @wraps(compute)
    def run(*arguments: Any, **settings: Any) -> Any:
        if arguments[0].dtype != torch.bfloat16:
            return compute(*arguments, **settings)
        wider = [argument.float() if _is_floating(argument) else argument for argument in arguments]
        if any(
            _is_floating(argument) and argument.dtype != torch.bfloat16 for argument in arguments
        ):
            wider = list(arguments)  # `compute` refuses these
        answer = compute(*wider, **settings)
        if isinstance(answer, Tensor):
            return answer.bfloat16()
        return (answer[0].bfloat16(), *answer[1:])

    return run


def _is_floating(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def checked(op: Op, *tensors: Tensor, **attributes: Any) -> tuple[tuple[Any, ...], ...]:
    """Check types, devices, shapes and attributes, without reading values; return output shapes.

    Raises: ShapeError, SaccadeError if an input or attribute does not fit the contract.
    """
    for port, tensor in zip(op.inputs, tensors, strict=True):
        op.checked_dtype(port, name_of(tensor.dtype), DTYPES)
        expected = tensors[0].dtype if port.dtype == "T" else tensor.dtype
        if tensor.device != tensors[0].device or tensor.dtype != expected:
            raise SaccadeError(
                f"{op.name}: input {port.name} is {name_of(tensor.dtype)} on {tensor.device}, but "
                f"input {op.inputs[0].name} is {name_of(tensors[0].dtype)} on "
                f"{tensors[0].device}. Convert one with .to()."
            )
    op.defaults(attributes)
    return op.output_shapes(*(tensor.shape for tensor in tensors))


def attributes(op: Op, **given: Any) -> tuple[Any, ...]:
    """Return the attributes in the node's order, with their declared types.

    In a compiled call, the operator checks them.
    Raises: SaccadeError for a value out of range.
    """
    return tuple(given.values() if torch.compiler.is_compiling() else op.defaults(given).values())


def kernels_for(tensor: Tensor) -> bindings.Kernels | None:
    """Return the native kernels if they are built and the tensor is on the CPU and not empty."""
    return bindings.kernels() if tensor.is_cpu and tensor.numel() else None


def run_kernel(
    kernels: bindings.Kernels,
    name: str,
    tensors: Sequence[Tensor | None],
    count: int,
    numbers: Sequence[float],
    **options: Any,
) -> None:
    """Call `Kernels.run` with torch's number of threads."""
    assert tensors[0] is not None
    code, threads = CODES[tensors[0].dtype], torch.get_num_threads()
    kernels.run(name, code, tensors, count, numbers, threads=threads, **options)


def schema(op: Op) -> str:
    """Return the torch schema of the node, such as `(Tensor z, float lam) -> Tensor`."""
    inputs = [f"Tensor {port.name.lower()}" for port in op.inputs]
    inputs += [
        f"{attribute.kind.__name__} {attribute.name}" for attribute in op.attributes.values()
    ]
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join(inputs)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def define(
    name: str,
    signature: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    shared: Sequence[int] = (),
) -> Any:
    """Define the operator `saccade::name` for every device, without a gradient, and return it.

    `shared` has the indices of tensors without leading axes.
    """
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{name}", fake, lib=_LIBRARY)
    operator = getattr(getattr(torch.ops, DOMAIN), name).default
    add_batching_rule(_LIBRARY, operator, shared)
    _COMPUTE[operator] = compute
    return operator


def in_float32_under_autocast(operator: Any) -> None:
    """Convert half-precision inputs to float32 under autocast, as torch does for softmax."""
    for device in ("cpu", "cuda"):
        torch.library.register_autocast(operator._schema.name, device, torch.float32, lib=_LIBRARY)


def is_plain_call(*arguments: Any) -> bool:
    """True for ordinary tensors with no active mode, transform, tracer or profiler."""
    for argument in arguments:
        # A tensor wrapped by a transform, even a finished one, has no data of its own.
        if isinstance(argument, Tensor) and (
            type(argument) not in _ORDINARY or _is_wrapped(argument) or _is_batched(argument)
        ):
            return False
    return (
        forward_ad._current_level < 0
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._ops._len_torch_dispatch_stack_pre_dispatch()
        and not torch._C._is_any_autocast_enabled()
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
    )


def call(operator: Any, *arguments: Any) -> Any:
    """Call an operator; a plain call bypasses the dispatcher, which is slow through Python."""
    if not torch.compiler.is_compiling() and is_plain_call(*arguments):
        return _PLAIN[operator](*arguments)
    return operator(*arguments)


def install(operator: Any, chooser: Callable[..., Callable[..., Any]]) -> None:
    """Intercept an operator with `chooser(run)`; `run(operator, *arguments)` calls the original."""
    _LIBRARY.impl(
        operator._schema.name.removeprefix(f"{DOMAIN}::"), chooser(_redispatch), "Autograd"
    )
    _PLAIN[operator] = chooser(compute)


def compute(operator: Any, *arguments: Any) -> Any:
    """Run an operator without its gradient, on tensors for which `is_plain_call` is true."""
    return _COMPUTE[operator](*arguments)


def _redispatch(operator: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)
