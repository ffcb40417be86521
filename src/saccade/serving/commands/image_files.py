# SPDX-License-Identifier: Apache-2.0
"""The image files and folders given to a command, sent so that a bad image fails alone."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from saccade.errors import SaccadeError
from saccade.escaped import escaped_message
from saccade.serving.bulk.listing import SUFFIXES
from saccade.serving.client.images import encoded, requests
from saccade.serving.client.rpc_errors import ImageRefused

MOST_FILES = 1000  # in folders; more are a bulk job, which can resume after an interruption
_T = TypeVar("_T")


@dataclass(frozen=True)
class Answered(Generic[_T]):
    """Answered images in the given order, and the reason for each that was refused."""

    paths: tuple[Path, ...]
    answers: tuple[_T, ...]
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


def answered(paths: Sequence[Path], ask: Callable[[list[bytes]], Sequence[_T]]) -> Answered[_T]:
    """Send all images, as many per request as fit; report bad ones and leave them out.

    `ask` sends the files of one request and returns one value per file.
    Raises: SaccadeError if no image could be answered.
    """
    refused: dict[Path, str] = {}
    readable = list(_readable(paths, refused))
    answers: list[tuple[Path, _T]] = []
    left = [path for path, _ in readable]
    for batch in requests([file for _, file in readable]):
        own, left = left[: len(batch)], left[len(batch) :]
        answers += _of_one_request(own, batch, ask, refused)
    if not answers:
        raise SaccadeError("\n".join(_reasons(refused)))
    in_order = {path: refused[path] for path in paths if path in refused}
    for line in _reasons(in_order):
        print(escaped_message(f"saccade: {line}"), file=sys.stderr)
    return Answered(tuple(path for path, _ in answers), tuple(a for _, a in answers), in_order)


def _readable(paths: Iterable[Path], refused: dict[Path, str]) -> Iterator[tuple[Path, bytes]]:
    for path in paths:
        try:
            (file,) = encoded([path])
        except SaccadeError as error:
            refused[path] = str(error).removeprefix(f"{path}: ")
        else:
            yield path, file


def _of_one_request(
    paths: Sequence[Path],
    files: Sequence[bytes],
    ask: Callable[[list[bytes]], Sequence[_T]],
    refused: dict[Path, str],
) -> Sequence[tuple[Path, _T]]:
    left = list(zip(paths, files, strict=True))
    while left:
        try:
            return list(
                zip([path for path, _ in left], ask([file for _, file in left]), strict=True)
            )
        except ImageRefused as error:
            path, _ = left.pop(error.index)
            refused[path] = error.reason
    return []


def _reasons(refused: dict[Path, str]) -> list[str]:
    return [f"{path}: {reason}" for path, reason in refused.items()]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file if the server refuses the image in the block."""
    try:
        yield
    except ImageRefused as error:
        raise SaccadeError(f"{path}: {error.reason}") from error
