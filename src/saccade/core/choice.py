# SPDX-License-Identifier: Apache-2.0
"""Options that accept one of several names, or a number within bounds."""

from collections.abc import Collection
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import Range


class _Texts(type):
    """Metaclass whose classes have every string as an instance."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


def choice_of(names: str) -> Any:
    """Return a type for strings that are one of the names returned by `module:function`.

    The type only affects the help; the owner of the option refuses other names.
    """
    return _Texts("Choice", (str,), {"names": names})


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
