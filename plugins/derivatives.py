# SPDX-License-Identifier: Apache-2.0
"""Give torch operators backward and forward derivatives, or refuse to differentiate them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade.core.errors import SaccadeError
from saccade.plugins import dispatch

# torch.autograd.Function without its handling of torch.func: the dispatcher has already done that
# when an operator's gradient is requested.
_Function: Any = torch.autograd.function._SingleLevelFunction
Run = Callable[..., Any]  # an operator and its arguments


def differentiate(
    operator: Any,
    rule: Any,
    keeping: Callable[..., tuple[Any, Sequence[Tensor]]],
    *,
    inputs: int = 1,
    constant: Sequence[int] = (),
    numbers: bool = False,
    along: Any = None,
) -> None:
    """Register an operator's gradient, with half the overhead of torch.library.register_autograd.

    `keeping(run, *arguments)` returns the answer and the tensors to keep, where
    `run(operator, *arguments)` runs an operator without its gradient. `rule` is an operator. Its
    arguments are the gradient of the first answer, the kept tensors and, with `numbers`, the
    arguments that are not tensors. It returns the gradients of the first `inputs` arguments.
    `along` is the forward-mode operator: it has tangents in place of the gradient and returns the
    answer's tangent. If it is not given, the Jacobian is symmetric and `rule` is used. `constant`
    has the indices of answers without a gradient.
    """

    def function(run: Run) -> Any:
        class Differentiable(_Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                answer, kept = keeping(run, *arguments)
                ctx.save_for_backward(*kept)
                ctx.save_for_forward(*kept)
                ctx.rest = (None,) * (len(arguments) - inputs)
                ctx.numbers = arguments[inputs:] if numbers else ()
                if constant:
                    ctx.mark_non_differentiable(*(answer[i] for i in constant))
                return answer

            @staticmethod
            def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
                given = (gradient, *ctx.saved_tensors)
                gradients = _gradient(rule, *given, *ctx.numbers)
                return (gradients, *ctx.rest) if inputs == 1 else (*gradients, *ctx.rest)

            @staticmethod
            def jvp(ctx: Any, *tangents: Any) -> Any:
                # A kept tensor may have a tangent itself, which does not affect this one.
                kept = [_unpacked(tensor).primal for tensor in ctx.saved_tensors]
                tangent = (along or rule)(*tangents[:inputs], *kept, *ctx.numbers)
                return (tangent, *(None for _ in constant)) if constant else tangent

        return Differentiable

    _give(operator, function, inputs)


def refuse(operator: Any, tensors: int) -> None:
    """Make an operator refuse to be differentiated.

    The first `tensors` arguments are tensors.
    """
    name = operator._schema.name

    def refusal(*_: Any) -> Any:
        raise SaccadeError(
            f"{name}: found a second derivative, expected only a first one: svpn and svpn_fast "
            "have no second derivative. Differentiate once, or detach() the inputs."
        )

    def function(run: Run) -> Any:
        class Refusing(_Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                return run(operator, *arguments)

            backward = staticmethod(refusal)
            jvp = staticmethod(refusal)

        return Refusing

    _give(operator, function, tensors)


def _give(operator: Any, function: Callable[[Run], Any], inputs: int) -> None:
    def chooser(run: Run) -> Run:
        plain = run is dispatch.compute
        apply = function(run if plain else _for_transforms_outside(run)).apply

        def choose(*arguments: Any) -> Any:
            given = arguments[:inputs]
            backward = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
            if not backward and (plain or not _any_moves(given)):
                return run(operator, *arguments)
            if not torch._C._are_functorch_transforms_active():
                return apply(*arguments)
            with torch._functorch.utils.enable_single_level_autograd_function():
                return apply(*arguments)

        return choose

    dispatch.install(operator, chooser)


def _for_transforms_outside(run: Run) -> Run:
    """Wrap `run` for use inside a function's forward, where torch disables derivatives.

    The current transform needs none there, but an outer one may: for it, this is a normal call.
    """

    def switched_on(operator: Any, *arguments: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return run(operator, *arguments)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return run(operator, *arguments)

    return switched_on


def _unpacked(tensor: Tensor) -> Any:
    """Return a value and its tangent; there is only one level, which is 0."""
    return forward_ad.unpack_dual(tensor, level=0)


def _any_moves(tensors: Sequence[Any]) -> bool:
    return any(_unpacked(tensor).tangent is not None for tensor in tensors)


def _gradient(rule: Any, *given: Any) -> Any:
    if not torch.is_grad_enabled() and dispatch.is_plain_call(*given):
        return dispatch.compute(rule, *given)
    return rule(*given)
