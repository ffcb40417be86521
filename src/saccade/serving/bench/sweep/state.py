# SPDX-License-Identifier: Apache-2.0
"""A sweep's folder: whose it is, and every finished piece of work in a file of its own."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade import limits
from saccade.errors import SaccadeError
from saccade.files import json_bytes, read_bounded, write_atomically
from saccade.json_text import parse_json
from saccade.leftovers import is_leftover
from saccade.schema import typed
from saccade.serving.bench.sweep.points import Failure, Point

SCHEMA = "saccade.sweep"
VERSION = 1
FILE_NAME = "sweep.json"


class SweepFolder:
    """The folder of one sweep.

    What is written under `points` is either whole or absent, so that a run that was killed goes
    on with the first piece that is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.artefacts = path / "artefacts"
        self.report = path / "report"

    def place(self, point: Point) -> Path:
        """Folder of the pieces of one point."""
        return self.path / "points" / point.variant

    def exported(self, point: Point) -> Path:
        """The artefact folder of that point alone."""
        return self.place(point) / "export"

    @property
    def last_written(self) -> float:
        """Time at which the last piece was finished, in seconds since 1970."""
        return max(path.stat().st_mtime for path in self.path.glob("points/*/*.json"))

    def read(self, point: Point, name: str) -> dict[str, Any] | None:
        """A finished piece, or none."""
        path = self.place(point) / f"{name}.json"
        if not path.exists():
            return None
        try:
            content = parse_json(read_bounded(path, limits.JSON_BYTES))
        except (OSError, ValueError) as error:
            raise SaccadeError(
                f"{path}: cannot be read ({error}). Remove it, and it is made again."
            ) from error
        if not isinstance(content, dict):
            raise SaccadeError(f"{path}: is not an object. Remove it, and it is made again.")
        return content

    def write(self, point: Point, name: str, content: dict[str, Any]) -> None:
        """Keep a finished piece."""
        data = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
        write_atomically(self.place(point) / f"{name}.json", (data + "\n").encode())

    def failure(self, point: Point) -> Failure | None:
        """Why the point failed, if it did."""
        content = self.read(point, "failed")
        if content is None:
            return None
        where = f"{self.place(point) / 'failed.json'}: "
        failure: Failure = typed(Failure, content, where)
        return failure

    def fail(self, point: Point, stage: str, reason: str) -> None:
        """Keep why a point failed."""
        failure = Failure(point.variant, point.setting, point.precision, stage, reason)
        self.write(point, "failed", asdict(failure))

    def forgive(self, point: Point) -> None:
        """Forget that the point failed."""
        (self.place(point) / "failed.json").unlink(missing_ok=True)


@contextmanager
def open_repository(path: Path, identity: dict[str, Any], *, force: bool) -> Iterator[SweepFolder]:
    """The folder, held by this process alone: a new one, or one of the same sweep.

    Raises: SaccadeError for a folder that is something else, a sweep of other options or another
        checkpoint without `force`, and one in which another process works.
    """
    if path.exists() and not path.is_dir():
        raise SaccadeError(f"--out is the file {path}, expected a folder. Choose another place.")
    if path.is_dir() and not force and any(_is_begun(entry) for entry in path.iterdir()):
        _refuse_other(path, identity)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another place.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SaccadeError(
                f"{path}: another process sweeps there. Wait for it, or choose another --out."
            ) from error
        if force or differences(path, identity):
            _empty(path)
            write_atomically(path / FILE_NAME, json_bytes(_file(identity)))
        _remove_halves(path)
        try:
            yield SweepFolder(path)
        finally:
            _remove_halves(path)


def differences(path: Path, identity: dict[str, Any]) -> list[str]:
    """In what the sweep that lies there differs from this one; all where none lies there."""
    try:
        stored = parse_json(read_bounded(path / FILE_NAME, limits.JSON_BYTES))
        known = dict(stored["of"])
        fits = (stored["schema"], stored["version"]) == (SCHEMA, VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return ["no sweep"]
    if not fits:
        return [f"{stored['schema']!r} version {stored['version']!r}"]
    wanted = _file(identity)["of"]
    return [
        f"{key} is {_shown(wanted.get(key))}, was {_shown(known.get(key))}"
        for key in sorted({*wanted, *known})
        if wanted.get(key) != known.get(key)
    ]


def _is_begun(path: Path) -> bool:
    """True if this is more than what a sweep that was killed at its first step leaves."""
    return path.name != ".lock" and not is_leftover(path)


def _refuse_other(path: Path, identity: dict[str, Any]) -> None:
    if not (path / FILE_NAME).exists():
        raise SaccadeError(
            f"{path}: exists already and is not a sweep (it has no {FILE_NAME}). "
            "Choose another place with --out, or pass --force to replace it."
        )
    differing = differences(path, identity)
    if differing and any(path.glob("points/*/*")):
        raise SaccadeError(
            f"{path}: holds another sweep: {'; '.join(differing)}. Give the same options to go on "
            "with it, choose another --out, or pass --force to start again."
        )


def _file(identity: dict[str, Any]) -> dict[str, Any]:
    # As it is read back: tuples are lists.
    of = json.loads(json.dumps(identity))
    return {"schema": SCHEMA, "version": VERSION, "of": of}


def _empty(path: Path) -> None:
    # First what says whose pieces these are: half of them must not look like a sweep.
    (path / FILE_NAME).unlink(missing_ok=True)
    for entry in path.iterdir():
        _remove(entry)


def _remove_halves(path: Path) -> None:
    """Remove what a process that was killed had begun to write."""
    for entry in sorted(path.rglob(".*")):
        if entry.exists():  # and not gone with a folder before it
            _remove(entry)


def link(source: Path, target: Path) -> None:
    """The same file in another place, at once whole; a copy on another file system."""
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:  # another file system
        shutil.copyfile(source, partial)
    partial.replace(target)


def _remove(path: Path) -> None:
    if path.name == ".lock":
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
