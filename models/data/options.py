# SPDX-License-Identifier: Apache-2.0
"""Options of commands for the user's own data, besides its path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from saccade.models.preprocessing import Preprocessing

# Takes work that reads all images, and returns its result, a value of JSON. The processes of a
# training run let one of them do it.
Once = Callable[[Callable[[], Any]], Any]


def here(work: Callable[[], Any]) -> Any:
    """Return what this work returns, done in this process."""
    return work()


@dataclass(frozen=True)
class DataOptions:
    """The options of the same names, and how a started model takes images."""

    labels: Path | None = None
    data_root: Path | None = None
    skip_bad: int = 0
    background: tuple[int, ...] = (0,)  # values of masks that are background
    preprocessing: Preprocessing | None = None  # of the checkpoint that training starts from
    shots: int | None = None  # training samples per class, drawn with `seed`; default: all
    seed: int = 0
    most: int | None = None  # samples to draw of the split, the same on every call; default: all
    once: Once = here


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
