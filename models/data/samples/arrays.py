# SPDX-License-Identifier: Apache-2.0
"""An .npz of samples: saccade's names of arrays, MNIST's or MedMNIST's."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from saccade.core.archives import array_names, read_arrays
from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.samples.labels import numbered_classes
from saccade.models.data.samples.masks import numbered_objects
from saccade.models.data.samples.source import (
    SPLIT,
    DataDescription,
    RowUnreadable,
    SampleSource,
    numbered,
)

_PREFIXES = ("train", "val", "test")


class LabeledArrays(SampleSource):
    """Rows of arrays, `count` of them: labels, and if there are some, class_names and split.

    Shapes: labels [n] of any integer type, class_names [k] and split [n] of text.
    Raises: SaccadeError if an array has other values, ShapeError if it has another shape.
    """

    def __init__(
        self,
        path: Path,
        arrays: Mapping[str, np.ndarray],
        count: int,
        given: DataDescription,
        what: str = "samples",
    ) -> None:
        self.path, self.arrays, self._what = path, arrays, what
        self._check_whole("labels", arrays["labels"], count)
        names = arrays.get("class_names") if given.labels is None else np.array(given.labels)
        self.labels, self.class_names = numbered_classes(str(path), arrays["labels"], names)
        if (splits := arrays.get("split")) is not None:
            if splits.shape != (count,):
                raise ShapeError(
                    f"{path}: split is {splits.shape}, expected one name for each of the {count} "
                    f"{what}."
                )
            self.split_of = np.array(
                [
                    SPLIT(name, partial(self.refused, row), "split")
                    for row, name in enumerate(splits.tolist())
                ],
                dtype=np.int8,
            )

    def lengths(self, name: str, most: int) -> np.ndarray:
        """Return the valid lengths of the rows of an array; without such lengths, all of it.

        Shapes: -> int64 [n].
        Raises: SaccadeError if one is not from 1 to `most`, ShapeError if there is not one per row.
        """
        lengths = self.arrays.get(name, np.full(len(self), most))
        self._check_whole(name, lengths, len(self))
        if not 1 <= lengths.min() <= lengths.max() <= most:
            raise SaccadeError(
                f"{self.path}: {name} range from {lengths.min()} to {lengths.max()}, expected 1 "
                f"to {most}. Leave empty {self._what} out."
            )
        return lengths.astype(np.int64)

    def _check_whole(self, name: str, values: np.ndarray, count: int) -> None:
        if values.shape != (count,) or values.dtype.kind not in "iu":
            raise ShapeError(
                f"{self.path}: {name} are {values.dtype} {values.shape}, expected one whole number "
                f"for each of the {count} {self._what}."
            )

    def read(self, row: int, most_bytes: int) -> bytes:
        """Do not call: arrays have values, not encoded images."""
        raise AssertionError("arrays have values")

    def row_name(self, row: int) -> str:
        """Return the row's number."""
        return numbered(row)


class ArrayFile(LabeledArrays):
    """The images of an .npz with their labels or masks; its arrays are in memory.

    Shapes: images [n h w] or [n h w c] uint8; labels [n] or [n 1] of any integer type, class_names
            [k]; masks [n h w] or [n h w 1] of any integer type, which may be absent.
    Raises: SaccadeError if an array is missing or of the wrong type, ShapeError if shapes differ.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path, names = path, names_in(path)
        # Labels also balance splits where masks would be wanted but are not there.
        labeled = any(name.endswith("labels") or name.startswith("y_") for name in names)
        masked = any(name.endswith("masks") for name in names)
        beside = "masks" if given.beside == "mask" and (masked or not labeled) else "labels"
        parts = _parts(beside, names)
        has = [part[2] in names for part in parts] if beside == "masks" else [True]
        if any(has) and not all(has):
            raise SaccadeError(
                f"{path}: {parts[has.index(False)][1]} has no masks, but others have. Add "
                f"{parts[has.index(False)][2]}, or leave all masks out."
            )
        self.masked = beside == "masks" and all(has)
        wanted = [name for part in parts for name in part[1 : 3 if all(has) else 2]]
        arrays = npz_arrays(path, wanted)
        images = [checked_images(path, arrays[part[1]], part[1]) for part in parts]
        shapes = {part.shape[1:] for part in images}
        if len(shapes) > 1:
            raise ShapeError(
                f"{path}: images are {sorted(shapes)}, expected one size in all splits."
            )
        self.images = images[0] if len(images) == 1 else np.concatenate(images)
        count = len(self.images)
        if parts[0][0] >= 0:
            sizes = [len(part) for part in images]
            self.split_of = np.repeat([part[0] for part in parts], sizes).astype(np.int8)
        pairs = zip(parts, images, strict=True)
        if beside == "labels":
            self._what = "images"
            labels = [self._labels(arrays[part[2]], part[2], len(own)) for part, own in pairs]
            known = {name: arrays[name] for name in ("class_names",) if name in arrays}
            super().__init__(path, known | {"labels": np.concatenate(labels)}, count, given)
            return
        self.without_classes(count)
        masks = [self._masks(arrays[part[2]], part[2], own.shape) for part, own in pairs if has[0]]
        self._indices = np.concatenate(masks) if masks else None

    def _labels(self, labels: np.ndarray, name: str, count: int) -> np.ndarray:
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        self._check_whole(name, labels, count)
        return labels.astype(np.int64)

    def _masks(self, masks: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = masks.shape
        masks = masks[..., 0] if masks.ndim == 4 and found[-1] == 1 else masks
        if masks.dtype.kind not in "iub" or masks.shape != shape[:3]:
            raise ShapeError(
                f"{self.path}: {name} are {masks.dtype} {found}, expected whole numbers "
                f"{shape[:3]}, the index of an object per pixel. From one mask per object, take "
                f"{name}.argmax(1)."
            )
        return masks

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the images of these rows.

        Shapes: rows [k] -> uint8 [k h w c].
        """
        return np.ascontiguousarray(self.images[rows])

    def masks(self, rows: np.ndarray, background: Sequence[int]) -> np.ndarray | None:
        """Return the masks of these rows, objects numbered from 1, or None if there are none.

        Shapes: rows [k] -> uint8 [k h w].
        """
        if not self.masked or self._indices is None:
            return None
        masks = np.empty((len(rows), *self._indices.shape[1:]), dtype=np.uint8)
        for place, row in enumerate(rows.tolist()):
            try:
                masks[place] = numbered_objects(self._indices[row], background)
            except RowUnreadable as error:
                raise self.refused(row, f"{error}.") from error
        return masks


def names_in(path: Path) -> frozenset[str]:
    """Return the names of the arrays in an .npz; none if it cannot be read."""
    try:
        return frozenset(array_names(path))
    except (OSError, ValueError):
        return frozenset()


def _parts(beside: str, names: frozenset[str]) -> list[tuple[int, str, str]]:
    """Return the split, images, and labels or masks of each part that the file has."""
    plain = [(-1, "images", beside)]
    layouts = [plain]
    if beside == "labels":
        layouts.append([(0, "x_train", "y_train"), (2, "x_test", "y_test")])
    layouts.append(
        [(split, f"{name}_images", f"{name}_{beside}") for split, name in enumerate(_PREFIXES)]
    )
    found = ([part for part in layout if {*part[1:]} & names] for layout in layouts)
    return next(filter(None, found), plain)


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
    write = f"numpy.savez(path, {', '.join(f'{name}=...' for name in wanted)})"
    try:
        arrays = read_arrays(path, (*wanted, *optional, "class_names"))
        check_names(path, array_names(path), wanted, write)
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: not an .npz of plain arrays ({error}). Write it with {write}."
        ) from error
    return arrays


def check_names(path: Path, names: Collection[str], wanted: Sequence[str], write: str) -> None:
    """Check that a file has the arrays that are wanted; `write` is a call that writes them.

    Raises: SaccadeError if one is missing.
    """
    if missing := [name for name in wanted if name not in names]:
        listed = " and ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
        raise SaccadeError(
            f"{path}: found arrays {sorted(names)!r:.200}, expected {listed} "
            f"({missing[0]} is missing). Write it with {write}."
        )
