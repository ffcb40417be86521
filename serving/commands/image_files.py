# SPDX-License-Identifier: Apache-2.0
"""The image files and folders given to a command, sent so that a bad image fails alone."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from saccade.core.errors import SaccadeError
from saccade.core.progress import pace, progress_of
from saccade.core.verbosity import say
from saccade.models.data.samples.source import SUFFIXES
from saccade.serving.client.connection import ServerRefusedImage
from saccade.serving.client.images import encoded
from saccade.serving.client.request_sizes import Watch
from saccade.serving.client.wire import Steps

MOST_FILES = 1000  # in folders; more are a bulk job, which can resume after an interruption
_T = TypeVar("_T")


class Runs(Protocol):
    """A connection to a model that runs operations: a client, or a model in this process."""

    def run(self, steps: Steps[_T], watch: Watch) -> _T:
        """Run an operation."""


@dataclass(frozen=True)
class ImageAnswers(Generic[_T]):
    """Answers to images, whose paths are in the same order, and why others were refused."""

    paths: tuple[Path, ...]
    answers: _T
    refused: dict[Path, str]

    @property
    def exit_code(self) -> int:
        """1 if an image was not answered."""
        return 1 if self.refused else 0

    def refusals(self) -> list[dict[str, str]]:
        """Return the images that were not answered, as plain values for JSON."""
        return [{"image": str(path), "error": reason} for path, reason in self.refused.items()]


def image_files(given: Sequence[Path]) -> tuple[Path, ...]:
    """Return the given files, with each folder replaced by its images, sorted, at any depth.

    Raises: SaccadeError for no image, a folder without images, or too many images.
    """
    if not given:
        raise SaccadeError("No image given. Pass one or more PNG, JPEG or WebP files or folders.")
    files: list[Path] = []
    listed = 0
    for path in given:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(_images_in(path))
        listed += len(found)
        if not found:
            raise SaccadeError(
                f"{path}: found no image in this folder, expected {', '.join(SUFFIXES)} files. "
                "Pass another folder."
            )
        if listed > MOST_FILES:
            raise SaccadeError(
                f"{path}: found {listed:,} images in folders, expected at most {MOST_FILES:,} in "
                "one command. For more, use `saccade bulk ARTEFACT --input FOLDER --out ANSWERS`, "
                "which writes a data set and can resume after an interruption."
            )
        files += found
    return tuple(files)


def _images_in(folder: Path) -> Iterator[Path]:
    """List images as bulk jobs do: skip hidden files and folders, and do not follow links."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield Path(place, name)


def image_answers(
    paths: Sequence[Path], ask: Callable[[list[bytes]], Steps[_T]], connection: Runs
) -> ImageAnswers[_T]:
    """Ask about all images and show the progress; report bad ones and leave them out.

    `ask` returns the operation on the files.
    Raises: SaccadeError if no image could be answered.
    """
    refused: dict[Path, str] = {}
    readable = list(_readable(paths, refused))
    left = dict(enumerate(path for path, _ in readable))

    def leave_out(index: int, error: ServerRefusedImage) -> None:
        refused[left.pop(index)] = error.reason

    if not readable:
        raise SaccadeError("\n".join(_reasons(refused)))
    steps = ask([file for _, file in readable])
    with watching("images", len(readable), leave_out) as watch:
        try:
            answers = connection.run(steps, watch)
        except ServerRefusedImage as error:
            raise SaccadeError("\n".join(_reasons(refused))) from error
    in_order = {path: refused[path] for path in paths if path in refused}
    for line in _reasons(in_order):
        say(line)
    return ImageAnswers(tuple(left.values()), answers, in_order)


@contextmanager
def watching(
    what: str, total: int, refused: Callable[[int, ServerRefusedImage], None] | None = None
) -> Iterator[Watch]:
    """Show the progress of an operation on `total` samples, with samples per second."""
    began_s, done = time.monotonic(), 0
    with progress_of(what, total) as advance:

        def note(rows: int) -> None:
            nonlocal done
            done += rows
            advance(rows, f"{done:,} of {total:,}, {pace(done, began_s)} {what}/s")

        def leave_out(index: int, error: ServerRefusedImage) -> None:
            assert refused is not None
            refused(index, error)
            note(1)

        yield Watch(note, leave_out if refused else None)


def _readable(paths: Iterable[Path], refused: dict[Path, str]) -> Iterator[tuple[Path, bytes]]:
    for path in paths:
        try:
            (file,) = encoded([path])
        except SaccadeError as error:
            refused[path] = str(error).removeprefix(f"{path}: ")
        else:
            yield path, file


def _reasons(refused: dict[Path, str]) -> list[str]:
    return [f"{path}: {reason}" for path, reason in refused.items()]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file if the server refuses the image in the block."""
    try:
        yield
    except ServerRefusedImage as error:
        raise SaccadeError(f"{path}: {error.reason}") from error
