# SPDX-License-Identifier: Apache-2.0
"""The files of a repository: those that lie in it, never what a link in it leads to."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from saccade.errors import SaccadeError


class Entry(NamedTuple):
    """Something in a repository that is not a folder."""

    name: str  # as the description has it, with slashes
    path: Path
    kind: Literal["file", "link", "other"]


def entries(folder: Path) -> Iterator[Entry]:
    """All that lies in a folder and its folders, in a fixed order; no link is followed.

    Raises: OSError if a folder cannot be read.
    """
    # A stack of our own: folders may be nested deeper than calls.
    waiting = [Path(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            for item in sorted(listing, key=lambda entry: entry.name):
                path = Path(item.path)
                name = path.relative_to(folder).as_posix()
                if item.is_symlink():
                    yield Entry(name, path, "link")
                elif item.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    plain = item.is_file(follow_symlinks=False)
                    yield Entry(name, path, "file" if plain else "other")


def regular_files(folder: Path) -> dict[str, Path]:
    """Every file of a repository by its name in the description.

    Raises: SaccadeError for a link, for what is not a file, and for a folder that cannot be read.
    """
    files = {}
    try:
        for entry in entries(folder):
            if entry.kind != "file":
                raise SaccadeError(f"{entry.path}: {fault_of(entry)}")
            files[entry.name] = entry.path
    except OSError as error:
        raise SaccadeError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    return files


def fault_of(entry: Entry) -> str:
    """Why a repository must not have what is not a file, and what to do about it."""
    if entry.kind != "link":
        return "is neither a file nor a folder. Remove it."
    target = os.fspath(entry.path.readlink())
    return (
        f"is a link to {target:.200}, and the repository's hashes do not cover where that leads. "
        "Put the file or folder itself in its place (cp -RL)."
    )
