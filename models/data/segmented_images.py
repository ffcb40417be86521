# SPDX-License-Identifier: Apache-2.0
"""The user's images for models of objects, with the masks that scores compare, if there are any."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import (
    ImageFiles,
    check_shape,
    is_unlabelled,
    joined_sha256,
    plain_preprocessing,
    readable_rows,
    rows_of_split,
)
from saccade.models.data.options import DataOptions, keeps_loaded
from saccade.models.data.samples.arrays import ArrayFile
from saccade.models.data.samples.formats import EXPECTED, check_data, open_source
from saccade.models.data.samples.images import Images, fitting, pixels_sha256
from saccade.models.data.samples.listed_images import json_fields
from saccade.models.data.samples.masks import MOST_OBJECTS, MaskFolders, Masks, mask_folders
from saccade.models.data.samples.source import (
    ID,
    PATH,
    Cell,
    DataDescription,
    RowUnreadable,
    SampleSource,
    field_values,
    refusal,
    split_in,
)
from saccade.models.data.samples.tables import Root
from saccade.models.image_decoding import ImageInput
from saccade.models.preprocessing import Preprocessing

_JSON = (
    "COCO's JSON of instances: an object with a list of images (id, file_name, height, width) and "
    "of annotations (image_id, segmentation)"
)
_MOST_POLYGONS = 1_000  # in one annotation
_MOST_CROSSINGS = 2**22  # of lines of pixels, by the edges of a polygon; each takes 60 bytes


class _Instance(NamedTuple):
    """One object: polygons (float32 x, y of each) or run lengths, as compact as possible."""

    polygons: tuple[bytes, ...] = ()
    runs: bytes | str | None = None  # int64 counts, or COCO's text of them


class CocoInstances(SampleSource):
    """The images of COCO's JSON, with a mask drawn from their annotations.

    Of two objects in one pixel, the smaller one counts. Crowds (`iscrowd`) are background. A split
    in the file's name, such as instances_val2017.json, is that of all images.

    Raises: SaccadeError if the file or an annotation cannot be used, or its image is not listed.
    """

    def __init__(self, path: Path, given: DataDescription) -> None:
        self.path, self._root = path, Root(given.root or path.parent)
        self.masked, self._files = True, list[str]()
        self._sizes = array("q")  # height and width of each image
        self._instances: dict[Any, list[tuple[Any, _Instance]]] = {}  # each with its id
        self._ids: list[Any] = []
        for name, value in json_fields(path, _JSON):
            if name == "images":
                self._add_image(value)
            elif name == "annotations":
                self._add_instance(value)
        if not self._files:
            raise SaccadeError(f"{path}: found no images, expected {_JSON}.")
        if unknown := self._instances.keys() - set(self._ids):
            odd, _ = self._instances[next(iter(unknown))][0]
            raise SaccadeError(
                f"{path}: annotation {odd}: its image {next(iter(unknown))!r:.40} is not in the "
                "list of images. Add the image, or remove the annotation."
            )
        self.without_classes(len(self._files))
        if (split := split_in(path.name)) >= 0:
            self.split_of = np.full(len(self._files), split, dtype=np.int8)

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the image."""
        return self._root.read(self._files[row], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the id and the file of the image."""
        return f"image {self._ids[row]}: {self._files[row]}"

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return a mask of the size in the JSON, objects numbered from the largest."""
        height, width = self._sizes[2 * row], self._sizes[2 * row + 1]
        if height * width > wanted.max_megapixels * 1e6:
            raise RowUnreadable(
                f"the JSON declares {width} x {height} pixels, expected at most "
                f"{wanted.max_megapixels} megapixels. Make the image smaller"
            )
        instances = self._instances.get(self._ids[row], ())
        if len(instances) > MOST_OBJECTS:
            raise RowUnreadable(
                f"found {len(instances)} annotations, expected at most {MOST_OBJECTS} objects. "
                "Mark small ones with iscrowd"
            )
        mask = np.zeros((height, width), dtype=np.uint8)
        areas = np.full(MOST_OBJECTS + 1, height * width + 1)  # the background gives way to all
        for index, (identity, instance) in enumerate(instances, 1):
            try:
                inside = _drawn(instance, height, width)
            except ValueError as error:
                raise RowUnreadable(
                    f"annotation {identity}: {error}. Correct the annotation"
                ) from error
            areas[index] = inside.sum()
            larger, owner = areas >= areas[index], mask[inside]
            mask[inside] = np.where(larger[owner], np.uint8(index), owner)
        numbers = np.zeros(MOST_OBJECTS + 1, dtype=np.uint8)
        largest_first = np.argsort(-areas[1 : len(instances) + 1], kind="stable")
        numbers[1 + largest_first] = np.arange(1, len(instances) + 1)
        return numbers[mask]

    def _add_image(self, value: Any) -> None:
        refused = refusal(f"{self.path}: image {len(self._files) + 1:,}")
        cells = {"id": ID, "file_name": PATH, "height": _SIDE, "width": _SIDE}
        identity, name, *sides = field_values(value, refused, ", ".join(cells), **cells)
        self._files.append(name)
        self._ids.append(identity)
        self._sizes.extend(sides)

    def _add_instance(self, value: Any) -> None:
        entry = value if isinstance(value, dict) else {}
        identity = entry.get("id", "without an id")
        refused = refusal(f"{self.path}: annotation {identity}")
        cells = {"image_id": ID, "segmentation": _CROWD if entry.get("iscrowd") else _SEGMENTATION}
        image, instance = field_values(value, refused, _EXPECTED, **cells)
        if not entry.get("iscrowd"):
            self._instances.setdefault(image, []).append((identity, instance))


def _instance(segmentation: Any) -> _Instance | None:
    """Return the compact form of a segmentation, or None if it is none."""
    if isinstance(segmentation, list) and 0 < len(segmentation) <= _MOST_POLYGONS:
        polygons = [_polygon(points) for points in segmentation]
        return None if None in polygons else _Instance(tuple(filter(None, polygons)))
    counts = segmentation.get("counts") if isinstance(segmentation, Mapping) else None
    if isinstance(counts, str):
        return _Instance(runs=counts)
    if isinstance(counts, list) and all(type(n) is int and 0 <= n < 2**40 for n in counts):
        return _Instance(runs=array("q", counts).tobytes())
    return None


def _polygon(points: Any) -> bytes | None:
    if not isinstance(points, list) or len(points) < 6 or len(points) % 2:
        return None
    if any(type(x) not in (int, float) or abs(x) > 2**31 for x in points):
        return None
    return array("f", points).tobytes()


_EXPECTED = "image_id and segmentation. Pass COCO's JSON of instances, or write them"
_SIDE = Cell(
    "a number of pixels", lambda side: side if type(side) is int and 0 < side < 2**31 else None
)
_CROWD = Cell("a segmentation", lambda value: value)
_SEGMENTATION = Cell(
    f"polygons of at least 3 points (lists of x, y), up to {_MOST_POLYGONS:,}, or run lengths "
    "(counts and size)",
    _instance,
)


def _drawn(instance: _Instance, height: int, width: int) -> np.ndarray:
    if instance.runs is not None:
        runs = instance.runs
        counts = np.frombuffer(runs, np.int64) if isinstance(runs, bytes) else run_lengths(runs)
        return mask_of_runs(counts, height, width)
    inside = np.zeros((height, width), dtype=bool)
    for polygon in instance.polygons:
        points = np.frombuffer(polygon, np.float32).reshape(-1, 2).astype(np.float64)
        inside |= mask_of_polygon(points, height, width)
    return inside


def run_lengths(text: str) -> np.ndarray:
    """Return the run lengths in COCO's compressed text.

    A number is written in groups of five bits, lowest first, each as a character from `0` (48) on;
    32 marks that more follow, 16 in the last group a negative number. From the fourth on, numbers
    are differences from the second last.

    Raises: ValueError if the text is none of these.
    """
    counts: list[int] = []
    value = shift = 0
    for letter in text:
        code = ord(letter) - 48
        if not 0 <= code < 64 or shift > 35:
            raise ValueError(f"its counts are not run lengths (at {letter!r})")
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("its counts end inside a number")
    return np.array(counts, dtype=np.int64)


def mask_of_runs(counts: np.ndarray, height: int, width: int) -> np.ndarray:
    """Draw run lengths, outside and inside in turn, column by column.

    Shapes: counts [k] -> bool [height width].
    Raises: ValueError if they do not cover the image.
    """
    total = sum(counts.tolist())  # NumPy's sum of large ones would start again below zero
    if (counts < 0).any() or total != height * width:
        raise ValueError(
            f"its run lengths add up to {total}, expected {height * width}, the pixels of an image "
            f"of {width} x {height}"
        )
    inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(inside, counts).reshape(width, height).T


def mask_of_polygon(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Draw the pixels whose center is inside a polygon.

    Shapes: points [k 2] of x and y in pixels -> bool [height width].
    Raises: ValueError if its edges cross too many lines of pixels.
    """
    start, end = points, np.roll(points, -1, 0)
    # An edge crosses the lines of centers from the first below its upper end to its lower end.
    ends = np.stack((start[:, 1], end[:, 1]))
    first = np.ceil(ends.min(0) - 0.5).clip(0, height).astype(np.int64)
    last = np.ceil(ends.max(0) - 0.5).clip(0, height).astype(np.int64)
    counts = last - first
    if (total := int(counts.sum())) > _MOST_CROSSINGS:
        raise ValueError(
            f"its edges cross {total:,} lines of pixels, expected at most {_MOST_CROSSINGS:,}"
        )
    edge = np.repeat(np.arange(len(points)), counts)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (end - start)[edge]
    x = start[edge, 0] + (row + 0.5 - start[edge, 1]) * slope[:, 0] / slope[:, 1]
    column = np.ceil(x - 0.5).clip(0, width).astype(np.int64)
    crossings = np.zeros((height, width + 1), dtype=np.uint8)  # odd or even is enough
    np.add.at(crossings, (row, column), 1)
    return np.cumsum(crossings, 1, dtype=np.uint8)[:, :width] % 2 == 1


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
