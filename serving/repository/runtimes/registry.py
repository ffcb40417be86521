# SPDX-License-Identifier: Apache-2.0
"""Look up the server's side of a runtime: `SERVED` in the file of this folder with its name."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.options import choice_of
from saccade.exporter.runtimes.runtime import runtime_named, runtime_names

if TYPE_CHECKING:
    ServedName = str
else:
    ServedName = choice_of(f"{__name__}:served_names")


def served_runtime(name: str) -> Any:
    """Return the `ServedRuntime` of a runtime.

    The return type is `Any`, because importing `ServedRuntime` here would be circular.

    Raises: SaccadeError if there is no such runtime, or no server loads what it builds.
    """
    runtime = runtime_named(name)
    if not _is_served(name):
        raise SaccadeError(
            f"--runtime is {name}, expected {' or '.join(served_names())}: no server loads what "
            f"{runtime.title} builds."
        )
    return import_module(f"{__package__}.{name}").SERVED


def served_names() -> tuple[str, ...]:
    """Return the names of the runtimes that a server has."""
    return tuple(filter(_is_served, runtime_names()))


def _is_served(name: str) -> bool:
    return find_spec(f"{__package__}.{name}") is not None
