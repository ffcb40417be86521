# SPDX-License-Identifier: Apache-2.0
"""A sweep's folder: the identity of the sweep, and one file per finished piece of work."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import json_bytes, write_atomically
from saccade.core.leftovers import is_leftover
from saccade.core.schema import WrongValue, read_json, typed

SCHEMA = "saccade.sweep"
VERSION = 1
FILE_NAME = "sweep.json"
_AGAIN = "Remove it, and the next run makes it again."


@dataclass(frozen=True)
class Point:
    """One variant to make: a budget of the model at a precision."""

    variant: str  # name without a role
    setting: str
    precision: str
    budget: str  # value for `saccade export --budget`


@dataclass(frozen=True)
class Failure:
    """A point that failed, and so is not on the frontier, with the reason."""

    variant: str
    setting: str
    precision: str
    stage: str
    reason: str


class SweepFolder:
    """The folder of one sweep.

    A file under `points` is either complete or absent, so a run that was killed resumes with the
    first missing piece.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.artefacts = path / "artefacts"
        self.report = path / "report"

    def place(self, point: Point) -> Path:
        """Return the folder of the pieces of one point."""
        return self.path / "points" / point.variant

    def exported(self, point: Point) -> Path:
        """Return the artefact folder of that point only."""
        return self.place(point) / "export"

    @property
    def last_written(self) -> float:
        """Time when the last piece was finished. Units: seconds since 1970."""
        return max(path.stat().st_mtime for path in self.path.glob("points/*/*.json"))

    def read(self, point: Point, name: str, kind: Any = dict[str, Any]) -> Any:
        """Return a finished piece as `kind`, or None."""
        path = self.place(point) / f"{name}.json"
        if not path.exists():
            return None
        try:
            return typed(kind, read_json(path), f"{path}: ")
        except Damaged as error:
            raise SaccadeError(f"{path}: {error.args[1]}. {_AGAIN}") from error
        except WrongValue as error:
            raise SaccadeError(f"{error.finding} {_AGAIN}") from error

    def finished(self, point: Point, name: str) -> dict[str, Any]:
        """Return a piece that an earlier step finished."""
        content: dict[str, Any] | None = self.read(point, name)
        assert content is not None, f"{self.place(point) / name}"
        return content

    def piece(self, point: Point, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Make and store a piece that is not finished yet."""
        if self.read(point, name) is None:
            self.write(point, name, make())

    def write(self, point: Point, name: str, content: dict[str, Any]) -> None:
        """Store a finished piece."""
        data = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
        write_atomically(self.place(point) / f"{name}.json", (data + "\n").encode())

    def failure(self, point: Point) -> Failure | None:
        """Return why the point failed, or None if it did not."""
        failure: Failure | None = self.read(point, "failed", Failure)
        return failure

    def fail(self, point: Point, stage: str, reason: str) -> None:
        """Record why a point failed."""
        failure = Failure(point.variant, point.setting, point.precision, stage, reason)
        self.write(point, "failed", asdict(failure))

    def forgive(self, point: Point, name: str = "failed") -> None:
        """Remove the record that the point, or something of it, failed."""
        (self.place(point) / f"{name}.json").unlink(missing_ok=True)


@contextmanager
def open_repository(path: Path, identity: dict[str, Any], *, force: bool) -> Iterator[SweepFolder]:
    """Open and lock the folder: a new one, or one of the same sweep.

    Raises: SaccadeError for a folder with other content, a sweep with other options or another
        checkpoint without `force`, or a folder that another process uses.
    """
    if path.exists() and not path.is_dir():
        raise SaccadeError(f"--out is the file {path}, expected a folder. Choose another --out.")
    if path.is_dir() and not force and any(_is_begun(entry) for entry in path.iterdir()):
        _refuse_other(path, identity)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another --out.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SaccadeError(
                f"{path}: another sweep is running in this folder. Wait for it, or choose another "
                "--out."
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
    """Describe how the sweep in a folder differs from this one; empty if it is the same sweep."""
    try:
        stored = read_json(path / FILE_NAME)
        known = dict(stored["of"])
        fits = (stored["schema"], stored["version"]) == (SCHEMA, VERSION)
    except (SaccadeError, ValueError, KeyError, TypeError):
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
    """Return whether the entry is more than the remains of a sweep killed at its first step."""
    return path.name != ".lock" and not is_leftover(path)


def _refuse_other(path: Path, identity: dict[str, Any]) -> None:
    if not (path / FILE_NAME).exists():
        raise SaccadeError(
            f"{path}: exists already and is not a sweep (it has no {FILE_NAME}). "
            "Choose another --out, or pass --force to replace it."
        )
    differing = differences(path, identity)
    if differing and any(path.glob("points/*/*")):
        raise SaccadeError(
            f"{path}: contains a different sweep: {'; '.join(differing)}. Pass the same options "
            "to resume it, choose another --out, or pass --force to start again."
        )


def _file(identity: dict[str, Any]) -> dict[str, Any]:
    # As it will be read back: tuples become lists.
    of = json.loads(json.dumps(identity))
    return {"schema": SCHEMA, "version": VERSION, "of": of}


def _empty(path: Path) -> None:
    # Remove the identity first: half-removed pieces must not look like a sweep.
    (path / FILE_NAME).unlink(missing_ok=True)
    for entry in path.iterdir():
        _remove(entry)


def _remove_halves(path: Path) -> None:
    """Remove files that a killed process had only partly written."""
    for entry in sorted(path.rglob(".*")):
        if entry.exists():  # it may be gone together with its folder
            _remove(entry)


def link(source: Path, target: Path) -> None:
    """Link a file to another place atomically; copy it if that is on another file system."""
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
