# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: one of several values, or a number within bounds."""

from collections.abc import Collection

from saccade.core.errors import SaccadeError
from saccade.core.schema import Range


def check_one_of(name: str, value: object, names: Collection[object]) -> None:
    """Check that a value is one of these.

    Raises: SaccadeError if it is not.
    """
    if value not in names:
        raise SaccadeError(f"{name} is {value!r}, expected one of {', '.join(map(str, names))}.")


def check_within(name: str, value: float, bounds: Range) -> None:
    """Check that a number is within bounds.

    Raises: SaccadeError if it is not.
    """
    if not bounds.holds(value):
        raise SaccadeError(f"{name} is {value}, expected {bounds}.")
