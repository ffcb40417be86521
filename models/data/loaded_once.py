# SPDX-License-Identifier: Apache-2.0
"""The user's data while several variants of a model are scored or measured on it: loaded once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Loaded = TypeVar("Loaded")

_KEPT: ContextVar[dict[Any, Any] | None] = ContextVar("saccade_loaded", default=None)


@contextmanager
def loaded_once() -> Iterator[None]:
    """Inside the block, keep what functions with `keeps_loaded` return, for equal arguments.

    A block inside another one belongs to it. The data is released at the end.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def keeps_loaded(load: Callable[Arguments, Loaded]) -> Callable[Arguments, Loaded]:
    """Return a function that loads the same data once in each block of `loaded_once`.

    Its arguments are hashable, and nobody changes what it returns.
    """

    @wraps(load)
    def kept(*args: Arguments.args, **named: Arguments.kwargs) -> Loaded:
        loaded = _KEPT.get()
        if loaded is None:
            return load(*args, **named)
        key = (load, args, tuple(sorted(named.items())))
        if key not in loaded:
            loaded[key] = load(*args, **named)
        found: Loaded = loaded[key]
        return found

    return kept
