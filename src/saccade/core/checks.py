# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: one of several values, or a number within bounds."""

import difflib
from collections.abc import Collection, Iterable, Sequence

from saccade.core.errors import SaccadeError
from saccade.core.schema import Range


def check_one_of(name: str, value: object, names: Collection[object], advice: str = "") -> None:
    """Check that a value is one of these; `advice` ends the message.

    Raises: SaccadeError if it is not, with the most similar one.
    """
    if value not in names:
        known = [str(one) for one in names]
        raise SaccadeError(
            f"{name} is {value!r:.100}, expected {'one of ' * (len(known) > 1)}"
            f"{', '.join(known) or 'none'}."
            f"{did_you_mean(str(value), known)}{advice and ' '}{advice}"
        )


def check_once(name: str, values: Sequence[object]) -> None:
    """Check that no value occurs twice.

    Raises: SaccadeError for the first that does.
    """
    for value in values:
        if values.count(value) > 1:
            raise SaccadeError(f"{name} has {value} twice. Pass it once.")


def check_within(name: str, value: float, bounds: Range) -> None:
    """Check that a number is within bounds.

    Raises: SaccadeError if it is not.
    """
    if not bounds.holds(value):
        raise SaccadeError(f"{name} is {value}, expected {bounds}.")


_LONGEST = 100  # maximum number of characters to compare; the cost is quadratic


def nearest(word: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """Return the known name most similar to a word, if one is similar enough.

    `least` is the smallest similarity, from 0 to 1 (equal).
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word[:_LONGEST].lower(), names, n=1, cutoff=least)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?" to append to a message; empty if no name is similar."""
    close = nearest(word, known)
    return f" Did you mean {close}?" if close is not None and close != word else ""
