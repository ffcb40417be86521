# SPDX-License-Identifier: Apache-2.0
"""Trace an artefact folder through a command: who gets it, and how often files are read."""

import os
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from places import PACKAGE, TESTS

from saccade.exporter.artefact.folder import _TICK_NS

SOURCES = f"{PACKAGE}{os.sep}"
# Functions that hash a file; the second reads a checkpoint.
HASHING = ("core/files.py:sha256_of", "models/checkpoint_format.py:digests")
# For each command: the largest number of functions that get the folder, and of their files.
MOST = tomllib.loads((TESTS / "measures.toml").read_text())["walks"]
_WALKS: list["FolderWalk"] = []


class FolderWalk:
    """The trace of one folder in this process.

    `places` are the functions of `exporter` and `serving` that got it: as a path, as a string, as a
    path below it, or as an `ArtefactFolder`, whose methods count as well. General file readers in
    lower layers do not count. `opened` and `hashed` count by file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.places: set[str] = set()
        self.opened: Counter[str] = Counter()
        self.hashed: Counter[str] = Counter()
        self._names: dict[CodeType, str | None] = {}

    @property
    def files(self) -> set[str]:
        """The source files of these functions."""
        return {place.partition(":")[0] for place in self.places}

    def check(self, places: int, files: int) -> None:
        """Check the number of places, and that each file was read and hashed once.

        The frontier is read again when measurements are added to it. The answers of policies are
        read again by each repository that is written, since it computes their certificates.
        """
        assert len(self.places) <= places, f"{len(self.places)} places: {sorted(self.places)}"
        assert len(self.files) <= files, f"{len(self.files)} files: {sorted(self.files)}"
        hashed = {name: n for name, n in self.hashed.items() if not name.endswith(".policy.npz")}
        assert set(hashed.values()) == {1}, f"hashed {hashed}"
        manifests = {name: n for name, n in self.opened.items() if name.endswith(".manifest.json")}
        assert set(manifests.values()) == {1}, f"read {manifests}"

    def below(self, value: Any) -> Path | None:
        """Return `value` as a path if it is the folder or inside it."""
        if isinstance(value, str) and not value.startswith(str(self.folder)):
            return None
        if not isinstance(value, str | Path):
            return None
        path = Path(value)
        return path if self.folder in (path, *path.parents) and os.path.lexists(path) else None

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        """Profile function: record calls with the folder among their arguments."""
        code = frame.f_code
        if event != "call" or (name := self._name(code)) is None:
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals[argument] for argument in arguments if argument in frame.f_locals]
        paths = [path for path in map(self.below, given) if path is not None]
        is_given = paths or any(type(each).__name__ == "ArtefactFolder" for each in given)
        if is_given and name.startswith(("exporter/", "serving/")):
            self.places.add(name)
        if paths and name in HASHING:
            self.hashed[paths[0].relative_to(self.folder).as_posix()] += 1

    def _name(self, code: CodeType) -> str | None:
        if code not in self._names:
            place = code.co_filename
            inside = place.startswith(SOURCES)
            self._names[code] = (
                f"{Path(place).relative_to(PACKAGE).as_posix()}:{code.co_qualname}"
                if inside
                else None
            )
        return self._names[code]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _WALKS or not isinstance(arguments[0], str | os.PathLike):
        return
    for walk in _WALKS:
        path = walk.below(os.fspath(arguments[0]))
        if path is not None and path.is_file():
            walk.opened[path.relative_to(walk.folder).as_posix()] += 1


sys.addaudithook(_audit)  # it cannot be removed


def settled(folder: Path) -> Path:
    """Return the folder when its files are old enough that a change would alter their times."""
    newest = max(path.stat().st_ctime_ns for path in (folder, *folder.rglob("*")))
    while time.time_ns() <= newest + 2 * _TICK_NS:
        time.sleep(0.01)
    return folder


@contextmanager
def openings(folder: Path) -> Iterator[Counter[str]]:
    """Count how often each file of the folder is opened in the block."""
    walk = FolderWalk(folder)
    _WALKS.append(walk)
    try:
        yield walk.opened
    finally:
        _WALKS.remove(walk)


@contextmanager
def walked(folder: Path) -> Iterator[FolderWalk]:
    """Trace what the block does with the folder, in all threads that it starts."""
    walk = FolderWalk(settled(folder))
    before = sys.getprofile()
    _WALKS.append(walk)
    threading.setprofile(walk.called)
    sys.setprofile(walk.called)
    try:
        yield walk
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        _WALKS.remove(walk)
