# SPDX-License-Identifier: Apache-2.0
"""How a torch operator takes an axis more: the rules of torch.vmap and of batched gradients.

Every op has leading axes, so that the new axis becomes the first of them and one call does all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The axis of each argument that is mapped over, None where there is none.
Axes = Sequence[int | None]


def register(library: Any, operator: Any, shared: Sequence[int] = ()) -> None:
    """Gives an operator its rules.

    `shared` numbers the tensors without leading axes: where one of them is mapped over, the
    operator is called once for each.
    """

    def rule(info: Any, axes: Axes, *arguments: Any) -> tuple[Any, Any]:
        answer = _mapped(operator, info.batch_size, axes, arguments, shared)
        return answer, (0,) * len(answer) if isinstance(answer, tuple) else 0

    name = operator._schema.name
    torch.library.register_vmap(name, rule, lib=library)
    # What torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) are made of.
    library.impl(name.rpartition("::")[2], _older_rule(operator, shared), "Batched")


def _mapped(
    operator: Any, size: int, axes: Axes, arguments: Sequence[Any], shared: Sequence[int]
) -> Any:
    """The answers of all `size` calls, one behind the other on a new first axis."""
    if any(axes[i] is not None for i in shared):
        return _one_by_one(operator, size, axes, arguments)
    front = []
    for i, (each, axis) in enumerate(zip(arguments, axes, strict=True)):
        if axis is not None:
            each = each.movedim(axis, 0)
        elif isinstance(each, Tensor) and i not in shared:
            each = each.expand(size, *each.shape)
        front.append(each)
    return operator(*front)


def _one_by_one(operator: Any, size: int, axes: Axes, arguments: Sequence[Any]) -> Any:
    answers = [
        operator(
            *(
                each if axis is None else each.select(axis, i)
                for each, axis in zip(arguments, axes, strict=True)
            )
        )
        for i in range(size)
    ]
    if isinstance(answers[0], Tensor):
        return torch.stack(answers)
    return tuple(torch.stack(each) for each in zip(*answers, strict=True))


def _older_rule(operator: Any, shared: Sequence[int]) -> Callable[..., Any]:
    """The rule for the batched tensors that stood in torch before torch.func, and still do."""

    def run(*arguments: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        mapped = [_size_at(level, each) for each in arguments]
        while all(size is None for size in mapped):
            level -= 1
            mapped = [_size_at(level, each) for each in arguments]
        axes = [None if size is None else 0 for size in mapped]
        inside = [
            each if size is None else torch._remove_batch_dim(each, level, 1, 0)
            for each, size in zip(arguments, mapped, strict=True)
        ]
        size = next(each for each in mapped if each is not None)
        answer = _mapped(operator, size, axes, inside, shared)
        if isinstance(answer, Tensor):
            return torch._add_batch_dim(answer, 0, level)
        return tuple(torch._add_batch_dim(each, 0, level) for each in answer)

    return run


def _size_at(level: int, argument: Any) -> int | None:
    """How long the axis is that is mapped over at this level of nesting; None if there is none."""
    if not isinstance(argument, Tensor):
        return None
    # A tensor without such an axis gets one of the length that is given.
    one, two = (torch._remove_batch_dim(argument, level, n, 0).shape[0] for n in (1, 2))
    return one if one == two else None
