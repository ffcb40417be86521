# SPDX-License-Identifier: Apache-2.0
"""Conversion of strings to paths in options, as in every other Python library."""

from dataclasses import fields
from pathlib import Path


class PathFields:
    """Base of a frozen dataclass that turns strings in fields of type Path into paths."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, str) and field.type in (Path, Path | None):
                object.__setattr__(self, field.name, Path(value))
