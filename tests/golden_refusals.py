# SPDX-License-Identifier: Apache-2.0
"""Treat a refused recorded case as a failure of that case, not as the end of the run."""

from collections.abc import Callable, Iterable

from saccade.core.errors import SaccadeError


def lines_of(name: str, run: Callable[[], Iterable[str]]) -> list[str]:
    """Return the failures that a case reports, including a refusal."""
    try:
        return list(run())
    except SaccadeError as error:
        return [f"{name}: refused: {error}"]
