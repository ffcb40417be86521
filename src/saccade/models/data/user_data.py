# SPDX-License-Identifier: Apache-2.0
"""The user's own images: a folder of class folders, or an .npz."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from saccade.archives import array_names, read_arrays
from saccade.errors import SaccadeError, ShapeError
from saccade.files import check_labels, read_regular
from saccade.models.data.splits import stratified_split
from saccade.models.image_decoding import FORMATS, ImageRefused, Wanted, decode
from saccade.models.preprocessing import Preprocessing

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
_LEAST_PER_CLASS = 10  # with fewer, a class may be missing from validation
_GREY_MODES = {"1", "L", "I", "I;16", "I;16B", "F"}


def folder(
    path: Path, split: str, preprocessing: Preprocessing | None, side_px: int
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Load one split of a folder whose sub-folders are classes, in the order of their names.

    Shapes: images [n h w c] uint8, labels [n] int64.
    Raises: SaccadeError if a class or file cannot be used; hidden files are ignored.
    """
    classes = sorted(entry for entry in _visible(path) if entry.is_dir())
    stray = [entry.name for entry in _visible(path) if not entry.is_dir()]
    if stray:
        raise SaccadeError(
            f"{path}: found files next to the class folders (first: {sorted(stray)[:3]}), expected "
            "one folder per class and nothing else. Move the files."
        )
    files = {entry.name: _class_files(entry) for entry in classes}
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in files.values()])
    names = tuple(files)
    _check_classes(path, labels, names)
    everything = [file for paths in files.values() for file in paths]
    if preprocessing is None:
        channels = 1 if all(_is_grey(file) for file in everything) else 3
        # The checkpoint of a newly trained model resizes images in the same way.
        scale = ((0.0,) * channels, (1.0,) * channels)
        preprocessing = Preprocessing(side_px, side_px, channels, *scale)
    wanted = preprocessing.wanted()
    part = _part(labels, split)
    images = [_read_image(everything[i], wanted) for i in part]
    return np.stack(images), labels[part].astype(np.int64), names


def is_unlabelled(path: Path) -> bool:
    """Return whether these are images alone: a folder without class folders, or an .npz."""
    if path.is_dir():
        return any(entry.suffix.lower() in _SUFFIXES for entry in _visible(path))
    try:
        return path.suffix == ".npz" and "labels" not in array_names(path)
    except (OSError, ValueError):
        return False  # the reader of the labels says what is wrong


def unlabelled_images(path: Path, preprocessing: Preprocessing) -> np.ndarray:
    """Read the images of such a folder, in the order of their names, or of such an .npz.

    Shapes: -> uint8 [n h w c], of the size that the model takes.
    Raises: SaccadeError for a file that is not an image, ShapeError for an .npz of another size.
    """
    if path.is_dir():
        wanted = preprocessing.wanted()
        return np.stack([_read_image(file, wanted) for file in _class_files(path)])
    images = _npz_images(path, npz_arrays(path, ("images",))["images"])
    expected = (preprocessing.height_px, preprocessing.width_px, preprocessing.channels)
    if images.shape[1:] != expected:
        raise ShapeError(
            f"{path}: images are {images.shape[1:]} (height, width, channels), the model wants "
            f"{expected}. Pass images of that size, or a folder of image files."
        )
    return images


def npz(path: Path, split: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Load one split of an .npz with `images`, `labels` and optional `class_names`.

    Shapes: images [n h w] or [n h w c] uint8, labels [n] of any integer type, class_names [k].
    Raises: SaccadeError if an array is missing or of the wrong type, ShapeError if shapes differ.
    """
    arrays = npz_arrays(path, ("images", "labels"))
    images, labels = arrays["images"], arrays["labels"]
    images = _npz_images(path, images)
    check_whole(path, "labels", labels, len(images), "images")
    part, names = labelled_part(path, labels, arrays.get("class_names"), split)
    return np.ascontiguousarray(images[part]), labels[part].astype(np.int64), names


def _npz_images(path: Path, images: np.ndarray) -> np.ndarray:
    """The images with an axis of channels.

    Shapes: [n h w] or [n h w c] uint8 -> [n h w c].
    """
    shape = images.shape
    if images.dtype != np.uint8:
        raise SaccadeError(
            f"{path}: images are {images.dtype}, expected uint8 from 0 to 255. Convert them, for "
            "example with (255 * images).round().astype('uint8')."
        )
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape:
        raise ShapeError(
            f"{path}: images are {shape}, expected (n, h, w), (n, h, w, 1) or "
            "(n, h, w, 3), none of them 0."
        )
    return images


def labelled_part(
    path: Path, labels: np.ndarray, class_names: np.ndarray | None, split: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the rows of one split of labeled samples, and the names of their classes.

    Shapes: labels [n] of any integer type, class_names [k] -> int64 [rows].
    Raises: SaccadeError if labels and names do not match, or a class has too few samples.
    """
    names = _npz_names(path, labels, class_names)
    labels = labels.astype(np.int64)  # NumPy's bincount refuses unsigned ones
    _check_classes(path, labels, names)
    return _part(labels, split), names


def _part(labels: np.ndarray, split: str) -> np.ndarray:
    count = len(labels)
    return stratified_split(labels, validation=count // 10, test=count // 5)[split]


def _listed(names: tuple[str, ...]) -> str:
    return f"the class{'es' * (len(names) > 1)} {', '.join(names)}" if names else "no class folders"


def _check_classes(path: Path, labels: np.ndarray, names: tuple[str, ...]) -> None:
    if len(names) < 2:
        raise SaccadeError(
            f"{path}: found {_listed(names)}, expected at least two. "
            "A folder needs one sub-folder per class, an .npz labels from 0 to classes - 1."
        )
    counts = np.bincount(labels, minlength=len(names))
    small = {names[i]: int(n) for i, n in enumerate(counts) if n < _LEAST_PER_CLASS}
    if small:
        raise SaccadeError(
            f"{path}: too few samples in {len(small)} of the classes (first: {min(small)!r} with "
            f"{small[min(small)]}), expected at least {_LEAST_PER_CLASS} per class. Add samples or "
            "remove the class."
        )


def _visible(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if not entry.name.startswith(".")]


def _class_files(path: Path) -> list[Path]:
    files = sorted(_visible(path))
    foreign = [f.name for f in files if f.is_dir() or f.suffix.lower() not in _SUFFIXES]
    if foreign:
        raise SaccadeError(
            f"{path}: found {foreign[:3]}, expected only PNG, JPEG or WebP files. "
            "Convert or move the other files."
        )
    return files


def _is_grey(path: Path) -> bool:
    try:
        if not path.is_file():
            raise OSError("no file")
        with Image.open(path, formats=FORMATS) as image:
            return image.mode in _GREY_MODES
    except Exception as error:  # Pillow raises many types for damage
        raise SaccadeError(
            f"{path}: not a readable PNG, JPEG or WebP image ({type(error).__name__}, "
            f"{path.stat().st_size} bytes). Save it again, or remove it."
        ) from error


def _read_image(path: Path, wanted: Wanted) -> np.ndarray:
    """Decode a file with the router's own code."""
    try:
        return decode(read_regular(path, wanted.max_image_mib * 2**20), wanted)
    except (ImageRefused, OSError) as error:
        raise SaccadeError(f"{path}: {error}, or remove it.") from error


def npz_arrays(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names, and `class_names` if the file has them.

    Raises: SaccadeError if the file is not an .npz of plain arrays, or one of them is missing.
    """
    write = f"Write it with numpy.savez(path, {', '.join(f'{name}=...' for name in wanted)})."
    try:
        arrays = read_arrays(path, (*wanted, "class_names"))
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


def _npz_names(path: Path, labels: np.ndarray, given: np.ndarray | None) -> tuple[str, ...]:
    if not len(labels):
        raise SaccadeError(f"{path}: has no labels, expected one per sample.")
    low, high = int(labels.min()), int(labels.max())
    classes = high + 1 if given is None else given.size
    if low < 0 or high >= classes or classes > len(labels):
        raise SaccadeError(
            f"{path}: labels range from {low} to {high}, expected 0 to classes - 1"
            f"{'' if given is None else f' ({classes} class names)'}. Number the classes from 0."
        )
    if given is None:
        return tuple(str(index) for index in range(classes))
    if given.ndim != 1 or given.dtype.kind != "U" or len(set(given.tolist())) != classes:
        raise SaccadeError(
            f"{path}: class_names are {given.dtype} {given.shape}, expected distinct strings."
        )
    check_labels(given.tolist(), str(path), "class name")
    return tuple(given.tolist())
