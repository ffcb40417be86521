# SPDX-License-Identifier: Apache-2.0
"""Options take a path as text too, as every other Python library does."""

from dataclasses import fields
from pathlib import Path


class PathFields:
    """The base of a frozen dataclass: text in a field of type Path becomes a Path."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, str) and field.type in (Path, Path | None):
                object.__setattr__(self, field.name, Path(value))
