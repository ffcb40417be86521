# SPDX-License-Identifier: Apache-2.0
"""Look up the server's side of a runtime, which the runtime itself names."""

from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.options import choice_of
from saccade.exporter.runtimes.runtime import runtime_named, runtimes
from saccade.models.entry import imported

if TYPE_CHECKING:
    ServedName = str
else:
    ServedName = choice_of("saccade.serving.repository.runtimes.registry:served_names")


def served_runtime(name: str) -> Any:
    """Return the `ServedRuntime` of a runtime.

    The return type is `Any`, because importing `ServedRuntime` here would be circular.

    Raises: SaccadeError if there is no such runtime, or no server loads what it builds.
    """
    runtime = runtime_named(name)
    if runtime.served is None:
        raise SaccadeError(
            f"--runtime is {name}, expected {' or '.join(served_names())}: no server loads what "
            f"{runtime.title} builds."
        )
    return imported(runtime.served)


def served_names() -> tuple[str, ...]:
    """Return the names of the runtimes that a server has."""
    return tuple(runtime.name for runtime in runtimes() if runtime.served is not None)
