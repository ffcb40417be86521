# SPDX-License-Identifier: Apache-2.0
"""Images with the objects that their pixels belong to, and folders of both."""

import io
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.core.files import read_regular
from saccade.models.data.samples.images import Images
from saccade.models.data.samples.source import (
    SKIP_HINT,
    FolderFiles,
    RowUnreadable,
    files_in,
    given_splits,
    is_image,
    left_out,
    split_named,
    visible,
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


class Masks(Images):
    """The masks of some rows, resized as their images are, but to the nearest pixel.

    Objects are numbered from 1 in the order of their indices; `background` are indices that become
    0. Indexed like an array of uint8 [n h w].
    """

    ndim = 3

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
            raise self.source.refused(row, f"{error}, or remove it.{SKIP_HINT}") from error

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


class MaskFolders(FolderFiles):
    """Images in `images`, and for each a PNG with the same name but for its suffix in `masks`.

    Folders in `images` that are called as splits give the split. If none is, the parts do.

    Raises: SaccadeError if there is no image.
    """

    def __init__(self, path: Path, parts: Sequence[tuple[str, int]]) -> None:
        self.path, self.masked = path, True
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
        self.split_of = given_splits(splits)
        self.notes = left_out(path, strays, "neither images nor their masks")

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG beside the image."""
        name = self._mask_of[row]
        try:
            data = read_regular(self.path / name, wanted.max_image_mib * 2**20)
        except FileNotFoundError:
            raise RowUnreadable(f"found no mask {name}. Add it") from None
        return mask_in_file(data, name, wanted)
