# SPDX-License-Identifier: Apache-2.0
"""Folders whose sub-folders are classes, alone or in folders of train, val and test."""

import os
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels, read_regular
from saccade.models.data.samples.source import (
    DataDescription,
    SampleSource,
    is_hidden,
    left_out,
    split_named,
)

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def visible(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden, in the order of their names."""
    with os.scandir(path) as entries:
        kept = [entry for entry in entries if not is_hidden(entry.name)]
    return sorted(kept, key=lambda entry: entry.name)


def is_image(name: str) -> bool:
    """Return whether this is the name of an image file."""
    return name.lower().endswith(SUFFIXES)


class ClassFolders(SampleSource):
    """Images in class folders, in the order of their names; deeper folders belong to the class.

    Raises: SaccadeError if there is no class folder or no image.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path = path
        self._files: list[str] = []
        stray: list[str] = []
        found: list[tuple[str, int, int]] = []  # class, split or -1, images
        parts = _parts(path)
        for prefix, split in parts:
            for entry in visible(path / prefix):
                if not entry.is_dir():
                    stray.append(f"{prefix}{entry.name}")
                    continue
                before = len(self._files)
                self._add(f"{prefix}{entry.name}/", stray)
                found.append((entry.name, split, len(self._files) - before))
        names = tuple(sorted({name for name, _, _ in found}))
        if not self._files:
            raise SaccadeError(
                f"{path}: found {'no images in ' if names else ''}{_listed(names)}, expected one "
                "sub-folder per class with PNG, JPEG or WebP files."
            )
        self.class_names, index_of = classes_of(path, names, given)
        counts = [count for _, _, count in found]
        self.labels = np.repeat([index_of[name] for name, _, _ in found], counts).astype(np.int64)
        if parts[0][0]:  # the folders at the top are splits
            stray += [entry.name for entry in visible(path) if not entry.is_dir()]
            self.split_of = np.repeat([split for _, split, _ in found], counts).astype(np.int8)
        self.notes = left_out(path, stray, "that are not images in class folders")

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the file's bytes."""
        return read_regular(self.path / self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the file's path in the folder."""
        return self._files[row]

    def _add(self, prefix: str, stray: list[str]) -> None:
        for entry in visible(self.path / prefix):
            if entry.is_dir():
                self._add(f"{prefix}{entry.name}/", stray)
            else:
                (self._files if is_image(entry.name) else stray).append(f"{prefix}{entry.name}")


def _parts(path: Path) -> list[tuple[str, int]]:
    """Return the folders of classes, with a slash behind them, and the split of each or -1."""
    folders = [entry for entry in visible(path) if entry.is_dir()]
    named = [entry for entry in folders if split_named(entry.name) is not None]
    # A class may be called `train`: a split has folders in it, a class has images.
    if not folders or len(named) < len(folders) or not all(map(_has_folders, named)):
        return [("", -1)]
    return [(f"{entry.name}/", split_named(entry.name) or 0) for entry in named]


def _has_folders(entry: os.DirEntry[str]) -> bool:
    inside = visible(Path(entry.path))
    return any(one.is_dir() for one in inside) and not any(is_image(one.name) for one in inside)


def classes_of(
    path: Path, found: tuple[str, ...], given: DataDescription
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the names of the classes, and the class of each folder.

    Folders are called as the labels, or, if none is, they are the labels in the order of their
    names, as in ImageNet, whose folders have numbers.
    """
    check_labels(found, str(path), "class folder")
    if given.labels is None:
        return found, {name: index for index, name in enumerate(found)}
    index_of = {name: index for index, name in enumerate(given.labels)}
    foreign = [name for name in found if name not in index_of]
    if len(foreign) == len(found) == len(given.labels):
        return given.labels, {name: index for index, name in enumerate(found)}
    if foreign:
        raise SaccadeError(
            f"{path}: {len(foreign)} of the {len(found)} class folders (first: {foreign[0]!r}) are "
            f"not in --labels {given.labels_path}, which has {len(given.labels)} labels. Add them, "
            "or pass as many labels as there are folders, in the order of the folders' names."
        )
    return given.labels, index_of


def _listed(names: tuple[str, ...]) -> str:
    return f"the class{'es' * (len(names) > 1)} {', '.join(names)}" if names else "no class folders"
