# SPDX-License-Identifier: Apache-2.0
"""Fields of options: strings become paths, and values are those that the annotations allow."""

from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from saccade.core.errors import SaccadeError
from saccade.core.schema import Range


class PathFields:
    """Base of a frozen dataclass of options.

    Strings in fields of type Path become paths, as in every other Python library.
    Raises: SaccadeError for a name that a `Literal` lacks, or a number outside the `Range` with
        which its field is annotated. A field may be `Annotated[int | None, Range(1)]`.
    """

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, str) and field.type in (Path, Path | None):
                object.__setattr__(self, field.name, Path(value))
            names = get_args(field.type) if get_origin(field.type) is Literal else (value,)
            if value not in names:
                known = " or ".join(map(str, names))
                raise SaccadeError(f"{flag_of(field.name)} is {value!r:.60}, expected {known}.")
            bounds = _range_of(field)
            if bounds is not None and value is not None and not bounds.holds(value):
                raise SaccadeError(f"{flag_of(field.name)} is {value}, expected {bounds}.")


def range_of(options: type, name: str) -> Range:
    """Return the bounds of a number among options."""
    (bounds,) = (_range_of(field) for field in fields(options) if field.name == name)
    assert bounds is not None, f"{name} has no bounds"
    return bounds


def flag_of(name: str) -> str:
    """Return the command-line option that sets a field."""
    return "--" + name.replace("_", "-")


def _range_of(field: Field[Any]) -> Range | None:
    notes = getattr(field.type, "__metadata__", ())
    return next((note for note in notes if isinstance(note, Range)), None)
