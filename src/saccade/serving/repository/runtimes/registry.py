# SPDX-License-Identifier: Apache-2.0
"""Registry of the server's side of runtimes; the runtime itself names it."""

from typing import TYPE_CHECKING, Any

from saccade.choice import choice_of
from saccade.errors import SaccadeError
from saccade.exporter.runtimes.runtime import runtime_named, runtimes
from saccade.models.entry import imported

if TYPE_CHECKING:
    ServedName = str
else:
    ServedName = choice_of("saccade.serving.repository.runtimes.registry:served_names")


def served_runtime(name: str) -> Any:
    """The `ServedRuntime` of a runtime; its type is not named here: it knows options and models.

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
    """The runtimes that a server runs."""
    return tuple(runtime.name for runtime in runtimes() if runtime.served is not None)
