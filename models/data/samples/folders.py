# SPDX-License-Identifier: Apache-2.0
"""Folders whose sub-folders are classes, alone or in folders of train, val and test."""

import os
from array import array
from collections.abc import Collection
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import check_labels
from saccade.models.data.samples.source import (
    DataDescription,
    FolderFiles,
    given_splits,
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


def files_in(folder: Path, prefix: str = "") -> list[str]:
    """Return the paths of all files in a folder and its sub-folders, in the order of names."""
    found = []
    for entry in visible(folder / prefix):
        name = f"{prefix}{entry.name}"
        found += files_in(folder, f"{name}/") if entry.is_dir() else [name]
    return found


class ClassFolders(FolderFiles):
    """Files in folders that are called as classes, at any depth.

    A folder that is called as a split gives the split. For images, only folders at the top are
    splits, and only if all are. Files of other `suffixes` may also be in a split of their class
    (chair/train/1.off, as in ModelNet).

    Raises: SaccadeError if there is no such file, or one is in no folder of a split.
    """

    def __init__(
        self, path: Path, given: DataDescription, suffixes: Collection[str] = SUFFIXES
    ) -> None:
        self.path = path
        images = suffixes is SUFFIXES
        at_top = images and _are_splits(path)
        self._files, splits = [], array("b")
        strays, classes = list[str](), list[str]()
        for name in files_in(path):
            folders = name.split("/")[:-1]
            if images:
                named, own = folders[: int(at_top)], folders[int(at_top) :]
            else:
                named = [folder for folder in folders if split_named(folder) is not None]
                own = [folder for folder in folders if split_named(folder) is None]
            if not own or not name.lower().endswith(tuple(suffixes)):
                strays.append(name)
                continue
            split = split_named(named[0]) if named else None
            self._files.append(name)
            classes.append(own[0])
            splits.append(-1 if split is None else split)
        if not self._files:
            raise SaccadeError(
                f"{path}: found no {' '.join(sorted(suffixes))} files in class folders, expected "
                "one sub-folder per class."
            )
        names = {*classes, *(_class_folders(path, at_top) if images else ())}
        self.class_names, index_of = classes_of(path, tuple(sorted(names)), given)
        self.labels = np.array([index_of[name] for name in classes], dtype=np.int64)
        self.split_of = given_splits(splits)
        if self.split_of is None and max(splits) >= 0:
            raise SaccadeError(
                f"{path}: {self._files[splits.index(-1)]} is in no folder of a split, but others "
                "are. Move it into train, val or test."
            )
        self.notes = left_out(path, strays, "that are of another kind, or in no class folder")


def _folders(path: Path) -> list[str]:
    return [entry.name for entry in visible(path) if entry.is_dir()]


def _class_folders(path: Path, at_top: bool) -> list[str]:
    """Return the names of all class folders, also of empty ones."""
    folders = _folders(path)
    return [own for split in folders for own in _folders(path / split)] if at_top else folders


def _are_splits(path: Path) -> bool:
    """Return whether the folders at the top are splits.

    A class may be called `train`: a split has folders in it, a class has images.
    """
    folders = _folders(path)
    return bool(folders) and all(
        split_named(name) is not None
        and _folders(path / name)
        and not any(is_image(entry.name) for entry in visible(path / name))
        for name in folders
    )


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
