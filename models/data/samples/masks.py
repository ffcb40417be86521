# SPDX-License-Identifier: Apache-2.0
"""Images with the objects that their pixels belong to: folders of both, manifests, arrays."""

import io
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.core.archives import array_names
from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.files import read_regular
from saccade.models.data.samples.arrays import checked_images, npz_arrays
from saccade.models.data.samples.folders import is_image, visible
from saccade.models.data.samples.images import Images
from saccade.models.data.samples.manifests import ListedFiles, path_in
from saccade.models.data.samples.source import (
    DataDescription,
    RowUnreadable,
    SampleSource,
    left_out,
    numbered,
    split_named,
)
from saccade.models.image_decoding import FORMATS, ImageInput, ImageRefused, fit

MOST_OBJECTS = 255
_IMAGES, _MASKS = "images", "masks"
_INDEXED = ("1", "L", "P", "I", "I;16", "I;16B")  # Pillow's modes with one number per pixel
_ORIENTATION = 0x0112  # of EXIF
_TURNED = {  # the orientations that exchange the sides
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class MaskSource(SampleSource):
    """Images without classes, whose rows have masks unless `masked` is false."""

    masked = True

    @abstractmethod
    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the index of the object of each pixel, as written.

        Shapes: -> [h w] of an integer type or bool.
        Raises: RowUnreadable, OSError.
        """


class Masks(Images):
    """The masks of some rows, resized as their images are, but to the nearest pixel.

    Objects are numbered from 1 in the order of their indices; `background` are indices that become
    0. Indexed like an array of uint8 [n h w].
    """

    ndim = 3
    source: MaskSource

    def __init__(self, images: Images, rows: np.ndarray, background: Sequence[int]) -> None:
        super().__init__(images.source, rows, images.wanted, images.once)
        self.shape = self.shape[:3]
        self._images, self._background = images, tuple(background)
        self._nearest = images.wanted._replace(
            channels=1,
            interpolation="nearest",
            fill=(0,),
            conversion="before",
            alpha="dropped",
            exif=False,
            channel_order="rgb",
        )

    def part(self, rows: np.ndarray) -> "Masks":
        """Return the masks of other rows."""
        return Masks(self._images, rows, self._background)

    def _one(self, row: int) -> np.ndarray:
        try:
            indices = self._upright(row, self.source.read_mask(row, self.wanted))
            objects = numbered_objects(indices, self._background)
            return fit(Image.fromarray(objects), self._nearest)[..., 0]
        except (ImageRefused, RowUnreadable, OSError) as error:
            raise self.source.refused(row, f"{error}, or remove it.") from error

    def _error(self, row: int) -> str | None:
        return self._images._error(row) or super()._error(row)

    def _upright(self, row: int, indices: np.ndarray) -> np.ndarray:
        """Turn a mask that was drawn on the image as it is stored, not as it is shown."""
        try:
            data = self.source.read(row, self.wanted.max_image_mib * 2**20)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                stored = (image.height, image.width)
                turn = _TURNED.get(image.getexif().get(_ORIENTATION, 1))
        except (RowUnreadable, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            raise RowUnreadable("cannot be opened. Save the image again") from None
        turn = turn if self.wanted.exif else None
        shown = stored if turn is None else stored[::-1]
        if indices.shape == shown:
            return indices
        if turn is not None and indices.shape == stored:
            return np.asarray(Image.fromarray(indices).transpose(turn))
        height, width = indices.shape
        raise RowUnreadable(
            f"its mask has {width} x {height} pixels, but the image {shown[1]} x {shown[0]}. Save "
            "both in one size"
        )


def numbered_objects(indices: np.ndarray, background: Sequence[int]) -> np.ndarray:
    """Number the objects of a mask from 1, in the order of their indices; 0 is the background.

    Shapes: [h w] of an integer type -> uint8 [h w].
    Raises: RowUnreadable if there are more objects than a byte can number.
    """
    values, places = np.unique(indices, return_inverse=True)
    objects = ~np.isin(values, background)
    if (count := int(objects.sum())) > MOST_OBJECTS:
        raise RowUnreadable(
            f"its mask has {count:,} different values, expected at most {MOST_OBJECTS} objects. "
            "Write the index of an object per pixel, not its shade"
        )
    numbers = (np.cumsum(objects) * objects).astype(np.uint8)
    return numbers[places].reshape(indices.shape)


def mask_in_file(data: bytes, name: str, wanted: ImageInput) -> np.ndarray:
    """Return the indices in a gray or palette PNG.

    Shapes: -> [h w] of an integer type or bool.
    Raises: RowUnreadable for another file, colors, or more pixels than an image may have.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.width * image.height > wanted.max_megapixels * 1e6:
                raise RowUnreadable(
                    f"its mask {name} has {image.width} x {image.height} pixels, expected at most "
                    f"{wanted.max_megapixels} megapixels. Make it smaller"
                )
            if image.mode not in _INDEXED:
                raise RowUnreadable(
                    f"its mask {name} has colors ({image.mode}), expected the index of an object "
                    "per pixel, in a gray or palette PNG. Replace each color by a number"
                )
            indices = np.asarray(image)
    except RowUnreadable:
        raise
    except Exception as error:  # Pillow raises many types for damage
        raise RowUnreadable(
            f"its mask {name} cannot be read as a PNG file. JPEG changes indices: save it as PNG"
        ) from error
    return indices.astype(np.uint8) if indices.dtype == bool else indices


def mask_folders(path: Path) -> list[tuple[str, int]]:
    """Return the folders that have `images` and `masks`, with a slash, and the split of each or -1.

    They are the folder itself, or folders in it that are called as splits.
    """
    if _has_both(path):
        return [("", -1)]
    entries = [entry for entry in visible(path) if entry.is_dir() and _has_both(path / entry.name)]
    named = [(f"{entry.name}/", split_named(entry.name)) for entry in entries]
    return [(name, split) for name, split in named if split is not None]


def _has_both(path: Path) -> bool:
    return all((path / name).is_dir() for name in (_IMAGES, _MASKS))


class MaskFolders(MaskSource):
    """Images in `images`, and for each a PNG with the same name but for its suffix in `masks`.

    Folders in `images` that are called as splits give the split. If none is, the parts do.

    Raises: SaccadeError if there is no image.
    """

    def __init__(self, path: Path, parts: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self._files: list[str] = []
        self._mask_of: list[str] = []
        splits, strays = array("b"), []
        for prefix, split in parts:
            folder, beside = path / f"{prefix}{_IMAGES}", path / f"{prefix}{_MASKS}"
            images = files_in(folder)
            masks = {file.rpartition(".")[0]: file for file in files_in(beside)}
            strays += [f"{prefix}{_IMAGES}/{name}" for name in images if not is_image(name)]
            for name in filter(is_image, images):
                stem = name.rpartition(".")[0]
                self._files.append(f"{prefix}{_IMAGES}/{name}")
                self._mask_of.append(f"{prefix}{_MASKS}/{masks.pop(stem, f'{stem}.png')}")
                inner = split_named(name.partition("/")[0]) if "/" in name else None
                splits.append(split if inner is None else inner)
            strays += [f"{prefix}{_MASKS}/{name}" for name in masks.values()]
        if not self._files:
            raise SaccadeError(
                f"{path}: found no images in {parts[0][0]}{_IMAGES}, expected PNG, JPEG or WebP "
                f"files, and for each a PNG of the same name in {_MASKS}."
            )
        self.without_classes(len(self._files))
        if -1 not in splits:
            self.split_of = np.array(splits, dtype=np.int8)
        self.notes = left_out(path, strays, "that are neither images nor their masks")

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the image."""
        return read_regular(self.path / self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the image's path in the folder."""
        return self._files[row]

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG beside the image."""
        name = self._mask_of[row]
        try:
            data = read_regular(self.path / name, wanted.max_image_mib * 2**20)
        except FileNotFoundError:
            raise RowUnreadable(f"found no mask {name}. Add it") from None
        return mask_in_file(data, name, wanted)


def files_in(folder: Path, prefix: str = "") -> list[str]:
    """Return the paths of all files in a folder and its sub-folders, in the order of names."""
    found = []
    for entry in visible(folder / prefix):
        name = f"{prefix}{entry.name}"
        found += files_in(folder, f"{name}/") if entry.is_dir() else [name]
    return found


class MaskManifest(ListedFiles, MaskSource):
    """A table of paths of images, and optionally of masks and splits.

    Raises: SaccadeError if no column has images, or a row has no path or an unknown split.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self._mask_of: list[str] = []
        for row, values, column in self.rows("mask"):
            if column:
                self._mask_of.append(path_in(row, values, column, self.refused))
        self.masked = bool(self._mask_of)
        self.without_classes(len(self._files))

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the file that the row names."""
        name = self._mask_of[row]
        try:
            data = self._root.read(name, wanted.max_image_mib * 2**20)
        except RowUnreadable as error:
            raise RowUnreadable(f"its mask {name}: {error}") from None
        return mask_in_file(data, name, wanted)


class MaskArrays(MaskSource):
    """The images and masks of an .npz; its arrays are in memory.

    Shapes: images [n h w] or [n h w c] uint8, masks [n h w] or [n h w 1] of any integer type, which
            may be absent; or train_images, train_masks, val_images, ... of the same shapes.
    Raises: SaccadeError if an array is missing or of the wrong type, ShapeError if shapes differ.
    """

    def __init__(self, path: Path, background: Sequence[int]) -> None:
        self.path = path
        parts = _parts(path)
        arrays = npz_arrays(path, [name for part in parts for name in part[1:] if name])
        images, masks, splits = [], [], []
        for split, images_name, masks_name in parts:
            images.append(checked_images(path, arrays[images_name], images_name))
            splits.append(np.full(len(images[-1]), split, dtype=np.int8))
            if masks_name:
                masks.append(self._checked(arrays[masks_name], masks_name, images[-1].shape[:3]))
        shapes = {part.shape[1:] for part in images}
        if len(shapes) > 1:
            raise ShapeError(
                f"{path}: images are {sorted(shapes)}, expected one size in all splits."
            )
        self.images = np.concatenate(images)
        self._indices = np.concatenate(masks) if masks else None
        self._background, self.masked = tuple(background), bool(masks)
        self.without_classes(len(self.images))
        if parts[0][0] >= 0:
            self.split_of = np.concatenate(splits)

    def _checked(self, masks: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = masks.shape
        masks = masks[..., 0] if masks.ndim == 4 and found[-1] == 1 else masks
        if masks.dtype.kind not in "iub" or masks.shape != shape:
            raise ShapeError(
                f"{self.path}: {name} are {masks.dtype} {found}, expected whole numbers {shape}, "
                "the index of an object per pixel. From one mask per object, take "
                f"{name}.argmax(1)."
            )
        return masks

    def masks(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the masks of these rows, objects numbered from 1, or None if there are none.

        Shapes: rows [k] -> uint8 [k h w].
        """
        if self._indices is None:
            return None
        numbered_masks = np.empty((len(rows), *self._indices.shape[1:]), dtype=np.uint8)
        for place, row in enumerate(rows.tolist()):
            try:
                numbered_masks[place] = numbered_objects(self._indices[row], self._background)
            except RowUnreadable as error:
                raise self.refused(row, f"{error}.") from error
        return numbered_masks

    def read(self, row: int, most_bytes: int) -> bytes:
        """Do not call: the images are pixels, not encoded."""
        raise AssertionError("`images` has the pixels")

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Do not call: masks are not resized."""
        raise AssertionError("`masks` returns them")

    def row_name(self, row: int) -> str:
        """Return the row's number."""
        return numbered(row)


def _parts(path: Path) -> list[tuple[int, str, str]]:
    """Return split, images and masks of each part of an .npz; no name for masks: it has none."""
    try:
        names = set(array_names(path))
    except (OSError, ValueError):
        names = set()  # reading the arrays says what is wrong
    prefixes = [(-1, "")] + [(i, f"{name}_") for i, name in enumerate(("train", "val", "test"))]
    found = [
        (split, f"{prefix}{_IMAGES}", f"{prefix}{_MASKS}" if f"{prefix}{_MASKS}" in names else "")
        for split, prefix in prefixes
        if f"{prefix}{_IMAGES}" in names
    ]
    if not found or found[0][0] < 0:
        found = found[:1] or [(-1, _IMAGES, _MASKS)]
    masked = [part[2] for part in found]
    if any(masked) and not all(masked):
        odd = found[masked.index("")][1]
        raise SaccadeError(
            f"{path}: {odd} has no masks, but others have. Add {odd.replace(_IMAGES, _MASKS)}, or "
            "leave all masks out."
        )
    return found
