# SPDX-License-Identifier: Apache-2.0
"""Exported folders that many tests read, created once for all test processes and kept between runs.

They are in `build/test-folders`, under a hash of everything that determines their content: the
exporting sources, the tiny models, installed versions, the CPU. Do not change them: a changed
folder is created again by the next process that needs it.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import IO

from places import PACKAGE, ROOT, TESTS, package_files

STORE = ROOT / "build" / "test-folders"
LATER = (PACKAGE / "serving", PACKAGE / "model_repository")  # these do not affect exports
PACKAGES = (
    "torch", "onnx", "onnxscript", "onnx-graphsurgeon", "onnxruntime", "numpy", "safetensors",
)  # fmt: skip
KEPT = 3  # folders of other sources, such as another branch
_CHECKED: set[Path] = set()
_HELD: list[IO[str]] = []


def stored(name: str, make: FunctionType) -> Path:
    """Return the folder `name`, which `make(place)` filled; treat it as read-only."""
    maker = hashlib.sha256(Path(make.__code__.co_filename).read_bytes()).hexdigest()
    place = _of_these_sources()
    folder = place / f"{name}-{maker[:8]}"
    if folder in _CHECKED:
        return folder
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not _is_whole(folder):
            _make(folder, make)
    _CHECKED.add(folder)
    return folder


def _make(folder: Path, make: FunctionType) -> None:
    for left in (folder, *folder.parent.glob(f".{folder.name}.*")):
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    make(partial)
    _record(folder).write_text(json.dumps(_hashes(partial)))
    partial.rename(folder)


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads(_record(folder).read_bytes()) == _hashes(folder)) and folder.exists()
    except (OSError, ValueError):
        return False


def _record(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@cache
def _of_these_sources() -> Path:
    place = STORE / source_hash()[:20]
    place.mkdir(parents=True, exist_ok=True)
    os.utime(place)
    held = (place / "in-use").open("a")
    fcntl.flock(held, fcntl.LOCK_SH)
    _HELD.append(held)  # until this process exits
    _sweep(place)
    return place


def _sweep(own: Path) -> None:
    """Remove all but a few folders of other sources, and none that a process is using."""
    with _locked(STORE / "sweeping.lock"):
        others = [path for path in STORE.iterdir() if path.is_dir() and path != own]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[
            : max(0, len(others) - KEPT)
        ]:
            with (old / "in-use").open("a") as held, suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)


@cache
def source_hash() -> str:
    """Return a hash of everything that determines the bytes of an export and its gate's figures."""
    known = [platform.machine(), sys.version, _cpu()]
    known += [f"{package} {version(package)}" for package in PACKAGES]
    digest = hashlib.sha256("\n".join(known).encode())
    files = [path for path in package_files("*") if _is_source(path)]
    for path in [*sorted(files), *sorted(TESTS.glob("tiny*.py")), TESTS / "quick_gate.py"]:
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _is_source(path: Path) -> bool:
    is_later = any(path.is_relative_to(folder) for folder in LATER)
    is_kept = path.suffix in {".py", ".json", ".hpp", ".cpp", ".h"} and path.is_file()
    return is_kept and not is_later


def _cpu() -> str:
    """Describe the CPU: on another one, a library may sum in another order."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
