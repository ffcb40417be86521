# SPDX-License-Identifier: Apache-2.0
"""An .npz of images and labels: saccade's names, MNIST's or MedMNIST's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from saccade.core.archives import array_names, read_arrays
from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.samples.labels import numbered_classes
from saccade.models.data.samples.source import DataDescription, SampleSource

# Names of the images and labels of each split (-1: all of them), by whose names they are.
_SAMPLES = ((-1, "images", "labels"),)
_MNIST = ((0, "x_train", "y_train"), (2, "x_test", "y_test"))
_MEDMNIST = tuple(
    (split, f"{name}_images", f"{name}_labels")
    for split, name in enumerate(("train", "val", "test"))
)
_LAYOUTS = (_SAMPLES, _MNIST, _MEDMNIST)


class ArrayFile(SampleSource):
    """The samples of an .npz; its arrays are in memory.

    Shapes: images [n h w] or [n h w c] uint8, labels [n] or [n 1] of any integer type,
            class_names [k].
    Raises: SaccadeError if an array is missing or of the wrong type, ShapeError if shapes differ.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path = path
        parts = _parts(path)
        arrays = npz_arrays(path, [name for part in parts for name in part[1:]])
        self._images, labels, splits = [], [], []
        for split, images_name, labels_name in parts:
            images = checked_images(path, arrays[images_name], images_name)
            whole = arrays[labels_name]
            whole = whole[:, 0] if whole.ndim == 2 and whole.shape[1] == 1 else whole
            check_whole(path, labels_name, whole, len(images), "images")
            self._images.append(images)
            labels.append(whole.astype(np.int64))
            splits.append(np.full(len(images), split, dtype=np.int8))
        shapes = {images.shape[1:] for images in self._images}
        if len(shapes) > 1:
            raise ShapeError(
                f"{path}: images are {sorted(shapes)}, expected one size in all splits."
            )
        if len(parts) > 1 or parts[0][0] >= 0:
            self.split_of = np.concatenate(splits)
        names = arrays.get("class_names")
        if given.labels is not None:
            names = np.array(given.labels)
        self.labels, self.class_names = numbered_classes(str(path), np.concatenate(labels), names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Return height, width and channels."""
        return self._images[0].shape[1:]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the images of these rows.

        Shapes: rows [k] -> uint8 [k h w c].
        """
        if len(self._images) == 1:
            return np.ascontiguousarray(self._images[0][rows])
        taken = np.empty((len(rows), *self.image_shape), dtype=np.uint8)
        start = 0
        for images in self._images:
            inside = (rows >= start) & (rows < start + len(images))
            taken[inside] = images[rows[inside] - start]
            start += len(images)
        return taken

    def read(self, row: int, most_bytes: int) -> bytes:
        """Do not call: the images are pixels, not encoded."""
        raise AssertionError("`take` returns the pixels")

    def row_name(self, row: int) -> str:
        """Return the row's number."""
        return f"row {row + 1:,}"


def _parts(path: Path) -> Sequence[tuple[int, str, str]]:
    """Return the split, images and labels of each part that the file has."""
    try:
        names = set(array_names(path))
    except (OSError, ValueError):
        return _SAMPLES  # reading the arrays says what is wrong
    for layout in _LAYOUTS:
        if found := [part for part in layout if {part[1], part[2]} & names]:
            return found
    return _SAMPLES


def checked_images(path: Path, images: np.ndarray, name: str = "images") -> np.ndarray:
    """Return the images with an axis of channels.

    Shapes: [n h w] or [n h w c] uint8 -> [n h w c].
    Raises: SaccadeError for another type, ShapeError for another shape.
    """
    shape = images.shape
    if images.dtype != np.uint8:
        raise SaccadeError(
            f"{path}: {name} are {images.dtype}, expected uint8 from 0 to 255. Convert them, for "
            f"example with (255 * {name}).round().astype('uint8')."
        )
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape:
        raise ShapeError(
            f"{path}: {name} are {shape}, expected (n, h, w), (n, h, w, 1) or "
            "(n, h, w, 3), none of them 0."
        )
    return images


def npz_arrays(
    path: Path, wanted: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the arrays of these names, and `class_names` and `optional` ones that the file has.

    Raises: SaccadeError if the file is not an .npz of plain arrays, or one of them is missing.
    """
    write = f"Write it with numpy.savez(path, {', '.join(f'{name}=...' for name in wanted)})."
    try:
        arrays = read_arrays(path, (*wanted, *optional, "class_names"))
        names = sorted(array_names(path))
    except (OSError, ValueError) as error:
        raise SaccadeError(f"{path}: not an .npz of plain arrays ({error}). {write}") from error
    if missing := [name for name in wanted if name not in arrays]:
        listed = " and ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
        raise SaccadeError(
            f"{path}: found arrays {names!r:.200}, expected {listed} "
            f"({missing[0]} is missing). {write}"
        )
    return arrays


def check_whole(path: Path, name: str, values: np.ndarray, count: int, what: str) -> None:
    """Check that there is one integer per sample.

    Raises: ShapeError if there is not.
    """
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise ShapeError(
            f"{path}: {name} are {values.dtype} {values.shape}, expected one whole number for "
            f"each of the {count} {what}."
        )
