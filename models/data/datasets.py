# SPDX-License-Identifier: Apache-2.0
"""Load data sets by name or path, as uint8 images and class indices."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.checks import check_one_of, did_you_mean
from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.verbosity import note_once
from saccade.models.data.options import DataOptions, keeps_loaded
from saccade.models.data.samples.arrays import ArrayFile, checked_images, names_in, npz_arrays
from saccade.models.data.samples.images import Images, at_size, fitting, is_gray
from saccade.models.data.samples.source import (
    FolderFiles,
    SampleSource,
    is_image,
    left_out,
    visible,
)
from saccade.models.data.splits import (
    SPLITS,
    calibration_rows,
    chosen_rows,
    drawn_rows,
    few_of_each,
    held_out,
    rows_by_split,
)
from saccade.models.preprocessing import Preprocessing

HELD_OUT = "held-out"  # test, or validation if the data has no test samples
SPLIT_CHOICES = (*SPLITS, "val", "all", HELD_OUT)


@dataclass(frozen=True)
class Dataset:
    """One split of a data set.

    Shapes: images [n h w c] uint8, an array or `samples.images.Images`, which are decoded when they
            are indexed; labels [n] int64, indices into class_names.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    digest: Callable[[], str] = field(repr=False, compare=False)
    split: str = "test"
    skipped: int = 0  # unreadable rows that were left out
    # The same images in the size of their files; None if they have none of their own.
    originals: Images | None = field(default=None, repr=False, compare=False)

    @property
    def sha256(self) -> str:
        """Return the hash of this split's images, labels and class names."""
        return self.digest()

    def first(self, count: int | None) -> "Dataset":
        """Return the first samples of a random order; the hash stays that of the split."""
        rows = drawn_rows(len(self.labels), count)
        if rows is None:
            return self
        own: Any = self.images
        images: Any = own.part(own.rows[rows]) if isinstance(own, Images) else own[rows]
        originals = self.originals and self.originals.part(self.originals.rows[rows])
        return replace(self, images=images, labels=self.labels[rows], originals=originals)


def load_data(
    name_or_path: str | Path,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    also: Sequence[str] = (),
    asked: DataOptions | None = None,
) -> Dataset:
    """Load one split of `digits`, `digits-sum`, `shapes`, `signs`, or of the user's data.

    `shapes` are scenes of one object, with the size of `preprocessing`, else 64 px. `signs` and the
    user's images are resized to the trained model's `preprocessing`, or for a new model to
    `side_px` by `side_px`, gray if every image is gray; pixels in arrays are not resized. The split
    `all` is every sample, those of training first. Of the split `train`, `asked.shots` samples of
    each class are drawn. `also` lists further names that the caller accepts, for the message.
    Raises: SaccadeError if there is no such data or it cannot be used, ShapeError if images do
        not have the shape that `preprocessing` requires.
    """
    check_one_of("split", split, SPLIT_CHOICES)
    split = "validation" if split == "val" else split
    if preprocessing is None and asked is not None:
        preprocessing = asked.preprocessing
    name = str(name_or_path)
    if name in _GENERATED:
        _check_unused(name, asked or DataOptions())
        split = "test" if split == HELD_OUT else split
        data = _generated(name, split, preprocessing, side_px, asked or DataOptions())
    else:
        data = _own(name, split, preprocessing, side_px, also, asked or DataOptions())
    return (
        data
        if preprocessing is None
        else replace(data, images=taken(name, data.images, preprocessing))
    )


def taken(name: str | Path, images: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Return images in arrays as a trained model takes them, resized if it takes smaller ones.

    Raises: ShapeError as `check_shape`.
    """
    images = at_size(images, preprocessing)
    check_shape(name, images, preprocessing)
    return images


def check_shape(name: str | Path, images: np.ndarray, preprocessing: Preprocessing) -> None:
    """Check that images in arrays have the size that a trained model takes.

    Raises: ShapeError if they have another one.
    """
    shape = images.shape[1:]
    expected = (preprocessing.height_px, preprocessing.width_px, preprocessing.channels)
    if shape != expected:
        raise ShapeError(
            f"{name}: images are {shape} (height, width, channels), the model expects {expected}. "
            "Pass the data that the model was trained for, image files, which are resized, or "
            "train again."
        )


_SHOWN = 10  # unreadable rows in notes
_BLOCK = 64  # images of a pass over all


def pixel_moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel, rounded as in a configuration.

    Shapes: images [n h w c] uint8 -> two [c].
    Units: fractions of full white.
    """
    if isinstance(images, Images):
        mean_of, std_of = images.once(lambda: _moments_by_block(images))
    else:
        pixels = images.reshape(-1, images.shape[-1]) / 255
        mean_of, std_of = pixels.mean(0), pixels.std(0)
    mean = tuple(round(float(mean), 4) for mean in mean_of)
    return mean, tuple(max(round(float(deviation), 4), 1e-3) for deviation in std_of)


def image_fields(images: np.ndarray, seen: np.ndarray | None = None) -> dict[str, Any]:
    """Return the fields of a configuration for images of this size, with the moments of `seen`.

    Shapes: images and seen (default: images) [n h w c] uint8.
    """
    _, height, width, channels = images.shape
    mean, std = pixel_moments(images if seen is None else seen)
    size = {"height_px": height, "width_px": width, "channels": channels}
    return size | {"mean": mean, "std": std}


def _moments_by_block(images: Images) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation from sums of whole numbers, which are exact."""
    totals = np.zeros((2, images.shape[-1]), dtype=np.int64)
    for start in range(0, len(images), _BLOCK):
        block = images[np.arange(start, min(start + _BLOCK, len(images)))].astype(np.int64)
        totals += [block.sum((0, 1, 2)), (block**2).sum((0, 1, 2))]
    count = math.prod(images.shape[:3])
    mean, square = totals / count / ([[255.0], [255.0**2]])
    return mean.tolist(), np.sqrt(np.maximum(square - mean**2, 0)).tolist()


_GENERATED = ("digits", "digits-sum", "shapes", "signs")
_Parts = tuple[np.ndarray, np.ndarray, tuple[str, ...]]


def _generated(
    name: str, split: str, preprocessing: Preprocessing | None, side_px: int, asked: DataOptions
) -> Dataset:
    from saccade.models.data.digits import digits, digits_sum

    sources: dict[str, Callable[[str], _Parts]] = {
        "digits": digits,
        "digits-sum": digits_sum,
        "shapes": lambda part: _shapes(part, preprocessing),
        "signs": lambda part: _signs(part, preprocessing or plain(side_px, 1)),
    }
    drawn = [sources[name](part) for part in (SPLITS if split == "all" else (split,))]
    images, labels = (np.concatenate(arrays) for arrays in list(zip(*drawn, strict=True))[:2])
    class_names = drawn[0][2]
    if asked.shots is not None and split == "train":
        rows = few_of_each(name, labels, class_names, asked.shots, asked.seed)
        images, labels = images[rows], labels[rows]
        drawn = [(images, labels, class_names)]
    if asked.most is not None:
        rows = calibration_rows(len(labels), min(asked.most, len(labels)))
        images, labels = images[rows], labels[rows]
    hashes = [_digest(*part) for part in drawn]
    return Dataset(images, labels, class_names, name, lambda: joined_sha256(hashes), split)


def _check_unused(name: str, asked: DataOptions) -> None:
    """Check that no option is given that generated data would ignore.

    Raises: SaccadeError if one is.
    """
    for option, path in (("--labels", asked.labels), ("--data-root", asked.data_root)):
        if path is not None:
            raise SaccadeError(
                f"{option} {path}: describes your own data, but {name} is a data set of saccade, "
                "with its own class names and no files. Drop it, or pass your own --data."
            )


def joined_sha256(hashes: Sequence[str]) -> str:
    """Return the hash of all splits, from theirs."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


@keeps_loaded
def _own(
    name: str,
    split: str,
    preprocessing: Preprocessing | None,
    side_px: int,
    also: Sequence[str],
    asked: DataOptions,
) -> Dataset:
    """Load the user's data; images that do not fit into KEPT_BYTES stay in their files."""
    from saccade.models.data.samples.formats import EXPECTED, check_data, open_source
    from saccade.models.data.samples.source import DataDescription

    check_data(name, EXPECTED, (*_GENERATED, *also))
    source = open_source(name, DataDescription.of(asked.labels, asked.data_root))
    if preprocessing is None and len(source.class_names) < 2:
        raise SaccadeError(
            f"{name}: found the class {source.class_names[0]}, expected at least two. A folder "
            "needs one sub-folder per class, a table or an .npz labels of two classes."
        )
    return split_of_source(source, name, split, preprocessing, side_px, asked)[0]


def rows_of_split(source: SampleSource, split: str) -> tuple[str, np.ndarray]:
    """Return the name of one of SPLIT_CHOICES as in SPLITS, or `all`, and its rows.

    Notes what was left out while listing.

    Shapes: -> int64 [rows].
    Raises: SaccadeError if the split is empty.
    """
    for text in source.notes:
        note_once(text)
    if split == "train":
        _check_classes(source)
    by_default = split == HELD_OUT
    split = {HELD_OUT: held_out(source.split_of), "val": "validation"}.get(split, split)
    rows = chosen_rows(source.path, split, source.labels, source.split_of)
    if by_default and len(rows) < (total := len(source.labels)):
        note_once(
            f"{source.path}: takes its {split} part, {len(rows):,} of {total:,} samples. "
            "--split all takes the others, too, if the model was not trained on them."
        )
    return split, rows


def _check_classes(source: SampleSource) -> None:
    """Note the classes of data to train on, and the sizes of its splits.

    Raises: SaccadeError for a class that only other splits have, such as one with a typo.
    """
    parts = rows_by_split(source.labels, source.split_of)
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in parts.items())
    names = source.class_names
    listed = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    classes = f"{len(names)} classes ({listed}); " if len(names) > 1 else ""
    note_once(f"{source.path}: {classes}samples: {sizes}")
    trained = {names[index] for index in np.unique(source.labels[parts["train"]])}
    there = {names[index] for index in np.unique(source.labels)}
    if source.split_of is not None and trained and (foreign := sorted(there - trained)):
        raise SaccadeError(
            f"{source.path}: the class {foreign[0]!r:.80} has samples, but none in the train "
            f"split.{did_you_mean(foreign[0], trained)} Correct its name, add training samples of "
            "it, or remove it from the other splits."
        )


def note_left_out(name: str, split: str, count: int, kept: int) -> None:
    """Note how many rows of a split were left out because they cannot be read."""
    if kept < count:
        note_once(f"{name}: left out {count - kept} of {count:,} rows of the split {split}")


def split_of_source(
    source: SampleSource,
    name: str,
    split: str,
    preprocessing: Preprocessing | None,
    side_px: int,
    asked: DataOptions,
) -> tuple[Dataset, np.ndarray]:
    """Return one split of a source's images, and the rows that they are.

    Unreadable rows are left out as `asked` says. Images that do not fit into KEPT_BYTES stay in
    their files.

    Shapes: -> int64 [images].
    Raises: SaccadeError if the split is empty, or more rows cannot be read than may be left out.
    """
    split, rows = rows_of_split(source, split)
    shown = Path(name).name
    if isinstance(source, ArrayFile):
        rows = _few(source, rows, asked, split)
        images = source.take(rows)
        return _kept(images, source, rows, shown, split), rows
    wanted = (preprocessing or plain_preprocessing(source, side_px)).wanted()
    lazy = Images(source, rows, wanted, asked.once)
    kept = readable_rows(name, split, lazy, asked.skip_bad)
    skipped = len(rows) - len(kept)
    rows = _few(source, kept, asked, split)
    if len(rows) < len(lazy):
        lazy = lazy.part(rows)
    images = fitting(lazy)
    if images is lazy:
        names = source.class_names
        digest = lazy.sha256
        labels = source.labels[rows]
        return Dataset(images, labels, names, shown, digest, split, skipped, lazy), rows
    data = _kept(images, source, rows, shown, split, skipped=skipped)
    return replace(data, originals=lazy), rows


def readable_rows(name: str, split: str, images: Images, most: int) -> np.ndarray:
    """Return the rows of these images without at most `most` unreadable ones, which are listed.

    Raises: SaccadeError if there are more. With 0, nothing is read.
    """
    unreadable = images.once(lambda: images.unreadable(most)) if most else []
    for _, text in unreadable[:_SHOWN]:
        note_once(f"left out: {text}")
    note_left_out(name, split, len(images), len(images) - len(unreadable))
    return np.delete(images.rows, [place for place, _ in unreadable])


def _few(source: SampleSource, rows: np.ndarray, asked: DataOptions, split: str) -> np.ndarray:
    """Return the rows of `asked.most`, or of `asked.shots` per class of the training split."""
    if asked.most is not None:
        return np.sort(rows[calibration_rows(len(rows), min(asked.most, len(rows)))])
    if asked.shots is None or split != "train":
        return rows
    where, names = str(source.path), source.class_names
    return rows[few_of_each(where, source.labels[rows], names, asked.shots, asked.seed)]


def _kept(
    images: np.ndarray,
    source: SampleSource,
    rows: np.ndarray,
    name: str,
    split: str,
    skipped: int = 0,
) -> Dataset:
    labels, names = source.labels[rows], source.class_names
    sha256 = _digest(images, labels, names)
    return Dataset(images, labels, names, name, lambda: sha256, split, skipped)


def plain_preprocessing(source: SampleSource, side_px: int) -> Preprocessing:
    """Return how images are resized for a new model, whose checkpoint resizes them likewise."""
    return plain(side_px, 1 if all(is_gray(source, row) for row in range(len(source))) else 3)


def plain(side_px: int, channels: int) -> Preprocessing:
    """Return how images are resized for a new model with that many channels."""
    return Preprocessing(side_px, side_px, channels, (0.0,) * channels, (1.0,) * channels)


def _shapes(split: str, preprocessing: Preprocessing | None) -> _Parts:
    """Load scenes with one object; the class is its color and shape."""
    from saccade.models.data.scene_texts import SCENE_LABELS, scene_label
    from saccade.models.data.shapes import scenes

    side_px = 64 if preprocessing is None else preprocessing.array_px[0]
    drawn = scenes(split, side_px=side_px, objects=(1, 1))
    labels = np.array([scene_label(objects) for objects in drawn.objects], dtype=np.int64)
    return drawn.images, labels, SCENE_LABELS


def _signs(split: str, preprocessing: Preprocessing) -> _Parts:
    from saccade.models.data.signs import CLASS_NAMES, resized, signs

    images, labels = signs(split)
    return resized(images, preprocessing.wanted()), labels, CLASS_NAMES


def _digest(images: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((images.shape, class_names)).encode())
    digest.update(images.tobytes())
    digest.update(labels.tobytes())
    return digest.hexdigest()


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
    images = taken(path, images, preprocessing)
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
