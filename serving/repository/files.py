# SPDX-License-Identifier: Apache-2.0
"""The files of a repository. Links are never followed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from saccade.core.errors import SaccadeError


class RepositoryEntry(NamedTuple):
    """An entry of a repository that is not a folder."""

    name: str  # as in the description, with slashes
    path: Path
    kind: Literal["file", "link", "other"]


def entries(folder: Path) -> Iterator[RepositoryEntry]:
    """Yield the entries of a folder and its subfolders in a fixed order, without following links.

    Raises: OSError if a folder cannot be read.
    """
    # An explicit stack: folders may be nested deeper than Python can recurse.
    waiting = [Path(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            for item in sorted(listing, key=lambda entry: entry.name):
                path = Path(item.path)
                name = path.relative_to(folder).as_posix()
                if item.is_symlink():
                    yield RepositoryEntry(name, path, "link")
                elif item.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    plain = item.is_file(follow_symlinks=False)
                    yield RepositoryEntry(name, path, "file" if plain else "other")


def regular_files(folder: Path) -> dict[str, Path]:
    """Return every file of a repository, by its name in the description.

    Raises: SaccadeError for a link, a special file, or a folder that cannot be read.
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


def fault_of(entry: RepositoryEntry) -> str:
    """Return why an entry that is not a regular file is refused, and what to do about it."""
    if entry.kind != "link":
        return "is neither a file nor a folder. Remove it."
    target = os.fspath(entry.path.readlink())
    return (
        f"is a link to {target:.200}, whose content the repository's hashes do not cover. "
        "Replace the link with the file or folder itself (cp -RL)."
    )
