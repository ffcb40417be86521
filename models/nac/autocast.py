# SPDX-License-Identifier: Apache-2.0
"""Functions that stay in float32 while the products around them run in bfloat16."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_float32(function: _Function) -> _Function:
    """Wrap the function to run without autocast, with half-precision arguments widened to float32.

    It is for values that bfloat16's eight bits cannot represent: 1 - cosine of two close
    signatures, a softmax, a loss. On a CPU, autocast leaves softmax and losses in bfloat16. Outside
    of autocast the function is called directly, so that traced models do not change.
    """

    @wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        values = (*arguments, *keywords.values())
        kind = next(
            (argument.device.type for argument in values if isinstance(argument, Tensor)), "cpu"
        )
        # A device such as meta, where parameters are only counted, does not support autocast.
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(*arguments, **keywords)
        with torch.autocast(kind, enabled=False):
            return function(*map(_wide, arguments), **{k: _wide(v) for k, v in keywords.items()})

    return wrapped  # type: ignore[return-value]


def _wide(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
