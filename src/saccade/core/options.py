# SPDX-License-Identifier: Apache-2.0
"""Options of commands: frozen dataclasses whose annotations say which values are allowed."""

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from saccade.core.errors import SaccadeError
from saccade.core.schema import Range, WrongValue, field_kinds, typed


class Options:
    """Base of a frozen dataclass whose fields are flags of a command and arguments in Python.

    Each value is checked as `saccade.core.schema` reads the field's annotation, and a string
    becomes a path where a path is expected, as in every other Python library.
    Raises: SaccadeError that names the flag.
    """

    # Names of fields by the heading under which a help shows them; the others come first.
    groups: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, kind in field_kinds(type(self)).items():  # type: ignore[arg-type]
            try:
                value = typed(kind, _plain(getattr(self, name)), f"{flag(name)}: ")
            except WrongValue as error:
                # Without the place in a list: whoever typed the value finds it by itself.
                raise SaccadeError(f"{flag(name)}: {error.comparison}") from None
            object.__setattr__(self, name, value)


def flag(name: str) -> str:
    """Return a field of options as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def range_of(options: type[Options], name: str) -> Range:
    """Return the bounds of a field that is a number; one that is true or false is 0 or 1."""
    kind = field_kinds(options)[name]  # type: ignore[arg-type]
    for one in (kind, *get_args(kind)):  # an optional number has its bounds inside
        for bound in getattr(one, "__metadata__", ()):
            if isinstance(bound, Range):
                return bound
    if kind is not bool:
        raise TypeError(f"{options.__name__}.{name} is {kind}, which has no bounds")
    return Range(0, 1)


def _plain(value: Any) -> Any:
    """Return a number of NumPy as Python's, also in a list."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.item() if getattr(value, "ndim", None) == 0 else value


class _Texts(type):
    """Metaclass whose classes have every string as an instance."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


def choice_of(names: str) -> Any:
    """Return a type for strings that are one of the names returned by `module:function`.

    The type only affects the help; the owner of the option refuses other names.
    """
    return _Texts("Choice", (str,), {"names": names})
