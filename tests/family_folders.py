# SPDX-License-Identifier: Apache-2.0
"""A tiny artefact folder of each family, exported once for all tests that read it."""

from pathlib import Path
from typing import Any

from folder_store import stored


def family_folder(family: str) -> Path:
    """The folder of that family, which all test processes share; do not change it."""
    return stored(family, lambda place: exported(family, place)) / "folder"


def exported(
    family: str, place: Path, precision: tuple[str, ...] = ("fp32",), **options: Any
) -> Path:
    """The folder of that family, exported into `place`."""
    import tiny_families

    return tiny_families.exported(family, place, precision, **options)
