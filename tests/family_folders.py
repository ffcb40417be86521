# SPDX-License-Identifier: Apache-2.0
"""A tiny artefact folder of each family, exported once by the first process that wants it."""

import fcntl
import importlib.util
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("tiny_families.py")


def family_folder(family: str, place: Path) -> Path:
    """The folder of that family under `place`, which all test processes share; do not change it."""
    folder = place / "families" / family / "folder"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            exported(family, folder.parent)
    return folder


def exported(
    family: str, place: Path, precision: tuple[str, ...] = ("fp32",), **options: Any
) -> Path:
    """The folder of that family, exported into `place`."""
    spec = importlib.util.spec_from_file_location("tiny_families", _SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Path = module.exported(family, place, precision, **options)
    return made
