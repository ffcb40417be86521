# SPDX-License-Identifier: Apache-2.0
"""An .npz of samples: saccade's names of arrays, MNIST's or MedMNIST's."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from saccade.core.archives import array_names, read_arrays
from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.samples.masks import numbered_objects
from saccade.models.data.samples.source import (
    SPLIT,
    DataDescription,
    LabelColumn,
    RowUnreadable,
    SampleSource,
    numbered,
    reading,
)

_PREFIXES = ("train", "val", "test")


class ArrayForm(NamedTuple):
    """Types by the beginnings of their names, axes, and words for both.

    An axis is a letter, sizes such as `1|3`, or a least size such as `3+`.
    """

    types: str
    axes: str
    words: str

    def check(
        self, path: Path, name: str, dtype: np.dtype | str, shape: Sequence[int], **sizes: int
    ) -> None:
        """Check the type and the shape of an array; `sizes` are those of axes, else above 0.

        Raises: ShapeError.
        """
        axes, kind = self.axes.split(), dtype if isinstance(dtype, str) else dtype.name
        fits = len(axes) == len(shape) and kind.startswith(tuple(self.types.split()))
        if not fits or not all(map(partial(_fits, sizes), axes, shape)):
            raise ShapeError(
                f"{path}: found {kind} {tuple(shape)} as {name}, expected "
                f"{self.words.format(name=name, **sizes)}."
            )


def _fits(sizes: Mapping[str, int], axis: str, size: int) -> bool:
    if axis.isalpha():
        return size == sizes.get(axis, max(1, size))
    return size >= int(axis[:-1]) if axis.endswith("+") else str(size) in axis.split("|")


_WHOLE = ArrayForm("int uint", "n", "one whole number for each of the {n} rows")
_NAMES = ArrayForm("str", "n", "one name for each of the {n} rows")
_TEXTS = ArrayForm("str", "k", "distinct strings, at least one")
_IMAGES = ArrayForm(
    "uint8",
    "n h w 1|3",
    "uint8 from 0 to 255, (n, h, w), (n, h, w, 1) or (n, h, w, 3), none of them 0; convert, for "
    "example, with (255 * {name}).round().astype('uint8')",
)
_MASKS = ArrayForm(
    "int uint bool",
    "n h w",
    "whole numbers ({n}, {h}, {w}), the index of an object per pixel; from one mask per object, "
    "take {name}.argmax(1)",
)


class LabeledArrays(SampleSource):
    """Rows of arrays, `count` of them: labels, and if there are some, class_names and split.

    Shapes: labels [n] of any integer type, class_names [k] and split [n] of text.
    Raises: SaccadeError if an array has other values, ShapeError if it has another shape.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, np.ndarray], count: int, given: DataDescription
    ) -> None:
        self.path, self.arrays = path, arrays
        labels = arrays["labels"]
        _WHOLE.check(path, "labels", labels.dtype, labels.shape, n=count)
        own = arrays.get("class_names")
        names = None if own is None else distinct_texts(path, "class_names", own)
        column = LabelColumn(labels.tolist())
        self.labels, self.class_names = column.classes(given, self.refused, names)
        if (splits := arrays.get("split")) is not None:
            _NAMES.check(path, "split", splits.dtype, splits.shape, n=count)
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
        _WHOLE.check(self.path, name, lengths.dtype, lengths.shape, n=len(self))
        if not 1 <= lengths.min() <= lengths.max() <= most:
            raise SaccadeError(
                f"{self.path}: {name} range from {lengths.min()} to {lengths.max()}, expected 1 "
                f"to {most}. Leave empty rows out."
            )
        return lengths.astype(np.int64)

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
        wanted = [name for _, *names in parts for name in names[: 1 + all(has)]]
        arrays = npz_arrays(path, wanted)
        images = [checked_images(path, arrays[part[1]], part[1]) for part in parts]
        shapes = {part.shape[1:] for part in images}
        if len(shapes) > 1:
            raise ShapeError(
                f"{path}: images are {sorted(shapes)}, expected one size in all splits."
            )
        self._images, sizes = images, [len(part) for part in images]
        count = sum(sizes)
        if parts[0][0] >= 0:
            self.split_of = np.repeat([part[0] for part in parts], sizes).astype(np.int8)
        second = [_single(arrays[part[2]]) for part in parts if all(has)]
        self._indices: list[np.ndarray] = []
        if beside == "labels":
            known = {name: arrays[name] for name in ("class_names",) if name in arrays}
            for (_, _, name), own, labels in zip(parts, images, second, strict=True):
                _WHOLE.check(path, name, labels.dtype, labels.shape, n=len(own))
            dtype = np.result_type(*second)  # floats for signed parts beside uint64
            dtype = dtype if dtype.kind in "iu" else np.dtype(np.int64)
            whole = np.concatenate(second, dtype=dtype, casting="unsafe")
            super().__init__(path, known | {"labels": whole}, count, given)
            return
        self.without_classes(count)
        if self.masked:
            for (_, _, name), own, masks in zip(parts, images, second, strict=True):
                n, h, w, _ = own.shape
                _MASKS.check(path, name, masks.dtype, masks.shape, n=n, h=h, w=w)
            self._indices = second

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the images of these rows.

        Shapes: rows [k] -> uint8 [k h w c].
        """
        return _taken(self._images, rows)

    def masks(self, rows: np.ndarray, background: Sequence[int]) -> np.ndarray | None:
        """Return the masks of these rows, objects numbered from 1, or None if there are none.

        Shapes: rows [k] -> uint8 [k h w].
        """
        if not self._indices:
            return None
        masks = np.empty((len(rows), *self._indices[0].shape[1:]), dtype=np.uint8)
        for place, row in enumerate(rows.tolist()):
            try:
                indices = _taken(self._indices, rows[place : place + 1])[0]
                masks[place] = numbered_objects(indices, background)
            except RowUnreadable as error:
                raise self.refused(row, f"{error}.") from error
        return masks


def _taken(parts: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return rows of arrays that follow each other, of which no copy is made as a whole."""
    taken = np.empty((len(rows), *parts[0].shape[1:]), dtype=np.result_type(*parts))
    start = 0
    for part in parts:
        inside = (rows >= start) & (rows < start + len(part))
        taken[inside] = part[rows[inside] - start]
        start += len(part)
    return taken


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
    Raises: ShapeError for another type or shape.
    """
    images = images[..., None] if images.ndim == 3 else images
    _IMAGES.check(path, name, images.dtype, images.shape)
    return images


def _single(array: np.ndarray) -> np.ndarray:
    """Return labels or masks without a last axis of size 1."""
    return array[..., 0] if array.ndim in (2, 4) and array.shape[-1] == 1 else array


def distinct_texts(path: Path, name: str, array: np.ndarray) -> list[str]:
    """Return the texts in an array.

    Raises: ShapeError if they are not distinct texts, or there is none.
    """
    distinct = len(set(array.ravel().tolist())) or 1
    _TEXTS.check(path, name, array.dtype, array.shape, k=distinct)
    texts: list[str] = array.tolist()
    return texts


def npz_arrays(
    path: Path, wanted: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the arrays of these names, and `class_names` and `optional` ones that the file has.

    Raises: SaccadeError if the file is not an .npz of plain arrays, or one of them is missing.
    """
    write = f"numpy.savez(path, {', '.join(f'{name}=...' for name in wanted)})"
    with reading(path, f"an .npz of plain arrays, as of {write}"):
        arrays = read_arrays(path, (*wanted, *optional, "class_names"))
        check_names(path, array_names(path), wanted, write)
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
