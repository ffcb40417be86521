# SPDX-License-Identifier: Apache-2.0
"""Functions that keep float32 where the products around them run in bfloat16."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_float32(function: _Function) -> _Function:
    """The function without autocast, its half-precision arguments widened to float32.

    For what bfloat16's eight bits cannot hold: 1 - cosine of two close signatures, a softmax, a
    loss. On a CPU autocast leaves softmax and losses in bfloat16. Outside autocast it is the
    function alone, so that a traced model is as it was.
    """

    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        kind = next(
            (argument.device.type for argument in given if isinstance(argument, Tensor)), "cpu"
        )
        # A device such as meta, on which parameters are only counted, has no autocast to ask.
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(*arguments, **named)
        with torch.autocast(kind, enabled=False):
            return function(*map(_wide, arguments), **{k: _wide(v) for k, v in named.items()})

    return wrapped  # type: ignore[return-value]


def _wide(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
