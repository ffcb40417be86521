# SPDX-License-Identifier: Apache-2.0
"""The user's images for models of objects, with the masks that scores compare, if there are any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from saccade.models.data.datasets import (
    ImageFiles,
    check_shape,
    is_unlabelled,
    joined_sha256,
    plain_preprocessing,
    readable_rows,
    rows_of_split,
)
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.arrays import ArrayFile
from saccade.models.data.samples.coco import CocoInstances
from saccade.models.data.samples.formats import EXPECTED, check_data, open_source
from saccade.models.data.samples.images import Images, fitting, pixels_sha256
from saccade.models.data.samples.masks import MaskFolders, Masks, mask_folders
from saccade.models.data.samples.source import DataDescription, SampleSource
from saccade.models.preprocessing import Preprocessing

MASKED = (
    "a folder with images/ and masks/, an .npz of images and masks, COCO's .json of instances, a "
    ".csv or .jsonl with columns of images and masks, a .parquet with their bytes, or a WebDataset "
    ".tar with a.jpg and a.mask.png"
)


@dataclass(frozen=True)
class SegmentedImages:
    """One split of images.

    Shapes: images [n h w c] uint8, an array or `samples.images.Images`; masks [n h w] uint8, an
            array or `samples.masks.Masks`, objects numbered from 1, 0 is background; None if the
            data has none.
    """

    images: np.ndarray
    masks: np.ndarray | None
    name: str
    digests: tuple[Callable[[], str], ...] = field(repr=False, compare=False)  # images, masks
    split: str = "test"
    skipped: int = 0  # unreadable rows that were left out
    # The same images in the size of their files; None if they have none of their own.
    originals: Images | None = field(default=None, repr=False, compare=False)

    @property
    def sha256(self) -> str:
        """Return the hash of this split's images, and of its masks."""
        return joined_sha256([digest() for digest in self.digests])

    @property
    def images_sha256(self) -> str:
        """Return the hash of this split's images; no mask is read."""
        return self.digests[0]()

    def first(self, count: int | None) -> "SegmentedImages":
        """Return the first images; the hash stays that of the split."""
        masks = None if self.masks is None else self.masks[:count]
        return replace(self, images=self.images[:count], masks=masks)


@keeps_loaded
def segmented_images(
    name: str,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    also: Sequence[str] = (),
    asked: DataOptions | None = None,
) -> SegmentedImages:
    """Load one split of the user's images, with masks if the data has some; labels are ignored.

    Images are resized as `datasets.load_data` does, and masks likewise, but to the nearest pixel.
    Images without given splits, and without labels, are drawn 70, 10 and 20 %.

    Raises: SaccadeError if there is no such data or it cannot be used, ShapeError if arrays do not
        have the size that `preprocessing` requires.
    """
    asked = asked or DataOptions()
    preprocessing = preprocessing or asked.preprocessing
    source = _opened(name, asked, also)
    split, rows = rows_of_split(source, split)
    shown = Path(name).name
    if isinstance(source, ArrayFile):
        images, true = source.take(rows), source.masks(rows, asked.background)
        if preprocessing is not None:
            check_shape(name, images, preprocessing)
        made = tuple(partial(pixels_sha256, part) for part in (images, true) if part is not None)
        return SegmentedImages(images, true, shown, made, split)
    wanted = (preprocessing or plain_preprocessing(source, side_px)).wanted()
    lazy = Images(source, rows, wanted, asked.once)
    masks = Masks(lazy, rows, asked.background) if source.masked else None
    kept = readable_rows(name, split, lazy if masks is None else masks, asked.skip_bad)
    skipped = len(rows) - len(kept)
    if skipped:
        lazy, masks = lazy.part(kept), None if masks is None else masks.part(kept)

    digests = tuple(part.sha256 for part in (lazy, masks) if part is not None)
    true = cast(np.ndarray | None, masks)
    return SegmentedImages(fitting(lazy), true, shown, digests, split, skipped, lazy)


def _opened(name: str, asked: DataOptions, also: Sequence[str]) -> SampleSource:
    path = Path(name)
    given = replace(DataDescription.of(asked.labels, asked.data_root), beside="mask")
    if path.is_dir():
        if parts := mask_folders(path):
            return MaskFolders(path, parts)
        return ImageFiles(path) if is_unlabelled(path) else open_source(name, given)
    if path.is_file() and path.suffix.lower() == ".json":
        return CocoInstances(path, given)
    check_data(name, f"{MASKED}; without masks, a folder of images, {EXPECTED}", also)
    return open_source(name, given)
