# SPDX-License-Identifier: Apache-2.0
"""A recorded case that the project refuses: a failure of that case, not the end of the run."""

from collections.abc import Callable, Iterable

from saccade.errors import SaccadeError


def lines_of(name: str, run: Callable[[], Iterable[str]]) -> list[str]:
    """The failures that a case reports; a refusal is one of them."""
    try:
        return list(run())
    except SaccadeError as error:
        return [f"{name}: refused: {error}"]
