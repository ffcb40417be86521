# SPDX-License-Identifier: Apache-2.0
"""The user's samples beside labeled images: images alone, and the split of labeled arrays."""

from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note_once
from saccade.models.data.datasets import check_shape
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.samples.arrays import checked_images, names_in, npz_arrays
from saccade.models.data.samples.folders import is_image, visible
from saccade.models.data.samples.images import Images, fitting
from saccade.models.data.samples.labels import numbered_classes
from saccade.models.data.samples.source import FolderFiles, left_out
from saccade.models.data.splits import calibration_rows, chosen_rows
from saccade.models.preprocessing import Preprocessing


def is_unlabelled(path: Path) -> bool:
    """Return whether these are images alone: a folder without class folders, or an .npz."""
    if path.is_dir():
        entries = visible(path)
        return any(is_image(entry.name) for entry in entries) and not any(
            entry.is_dir() for entry in entries
        )
    return path.suffix == ".npz" and {"images", "labels"} & names_in(path) == {"images"}


@keeps_loaded
def unlabelled_images(
    path: Path, preprocessing: Preprocessing, most: int | None = None
) -> np.ndarray:
    """Return the images of such a folder, in the order of their names, or of such an .npz.

    `most` of them are drawn, the same on every call; by default, all in order.

    Images that do not fit into memory are `samples.images.Images`, which are indexed alike.

    Shapes: -> uint8 [n h w c], of the size that the model takes.
    Raises: SaccadeError for a file that is not an image, ShapeError for an .npz of another size.
    """
    if path.is_dir():
        source = ImageFiles(path)
        for text in source.notes:
            note_once(text)
        return fitting(Images(source, _rows(len(source), most), preprocessing.wanted()))
    images = checked_images(path, npz_arrays(path, ("images",))["images"])
    check_shape(path, images, preprocessing)
    return images if most is None else images[_rows(len(images), most)]


def _rows(total: int, most: int | None) -> np.ndarray:
    return np.arange(total) if most is None else calibration_rows(total, min(most, total))


class ImageFiles(FolderFiles):
    """The images in a folder without sub-folders; all are of one class without a name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = [entry.name for entry in visible(path)]
        self._files = [name for name in names if is_image(name)]
        self.without_classes(len(self._files))
        self.notes = left_out(path, [name for name in names if not is_image(name)], "beside images")


def labelled_part(
    path: Path, labels: np.ndarray, class_names: np.ndarray | None, split: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the rows of one split of labeled samples, and the names of their classes.

    Shapes: labels [n] of any integer type, class_names [k] -> int64 [rows].
    Raises: SaccadeError if labels and names do not match, or there is one class only.
    """
    classes, names = numbered_classes(str(path), labels, class_names)
    if len(names) < 2:
        raise SaccadeError(
            f"{path}: found the class {names[0]}, expected at least two. Add samples of others."
        )
    return chosen_rows(path, split, classes), names
