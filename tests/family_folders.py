# SPDX-License-Identifier: Apache-2.0
"""A tiny artefact folder per family, exported once for all tests."""

from pathlib import Path
from typing import Any

from folder_store import stored


def family_folder(family: str) -> Path:
    """Return the folder of a family. All test processes share it: do not change it."""
    return stored(family, lambda place: exported(family, place)) / "folder"


def exported(
    family: str, place: Path, precision: tuple[str, ...] = ("fp32",), **options: Any
) -> Path:
    """Export a model of a family into `place`."""
    import tiny_families

    return tiny_families.exported(family, place, precision, **options)
