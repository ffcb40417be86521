# SPDX-License-Identifier: Apache-2.0
"""Load data sets by name or path, as uint8 images and class indices."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.errors import SaccadeError, ShapeError
from saccade.models.preprocessing import Preprocessing
from saccade.spelling import did_you_mean

SPLITS = ("train", "validation", "test")
CALIBRATION_SAMPLES = 256  # in a checkpoint: as many as the parity gate requires


@dataclass(frozen=True)
class Dataset:
    """One split of a data set.

    Shapes: images [n h w c] uint8, labels [n] int64, indices into class_names.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    sha256: str  # of this split's images, labels and class names


def load_data(
    name_or_path: str | Path,
    split: str,
    *,
    preprocessing: Preprocessing | None = None,
    side_px: int = 32,
    also: Sequence[str] = (),
) -> Dataset:
    """Load one split of `digits`, `digits-sum`, `shapes`, a folder of class folders, or an .npz.

    `shapes` are scenes of one object, with the size of `preprocessing`, else 64 px.
    A folder's images are resized to the trained model's `preprocessing`, or for a new model to
    `side_px` by `side_px`, gray if every file is gray. Splits of user data are drawn per class
    `side_px` by `side_px`, gray if every file is gray. Splits of user data are drawn per class
    with seed 0: 70 % train, 10 % validation, 20 % test. `also` lists further names that the
    caller accepts, for the message.
    Raises: SaccadeError if there is no such data or it cannot be used, ShapeError if images do
        not have the shape that `preprocessing` requires.
    """
    if split not in SPLITS:
        raise SaccadeError(f"split is {split!r}, expected one of {', '.join(SPLITS)}.")
    images, labels, class_names = _source(str(name_or_path), also)(split, preprocessing, side_px)
    if preprocessing is not None:
        shape = images.shape[1:]
        expected = (preprocessing.height_px, preprocessing.width_px, preprocessing.channels)
        if shape != expected:
            raise ShapeError(
                f"{name_or_path}: images are {shape} (height, width, channels), the model expects "
                f"{expected}. Pass the data that the model was trained for, or train again."
            )
    names = Path(name_or_path).name if Path(name_or_path).exists() else str(name_or_path)
    return Dataset(images, labels, class_names, names, _digest(images, labels, class_names))


def calibration_rows(total: int, count: int = CALIBRATION_SAMPLES) -> np.ndarray:
    """Choose rows of a training split for calibration, the same on every call.

    If there are fewer rows than samples, rows repeat: the parity gate needs that many samples.

    Shapes: -> int64 [count].
    """
    return np.random.default_rng(0).permutation(total)[np.arange(count) % total]


def pixel_moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation per channel, rounded as in a configuration.

    Shapes: images [n h w c] uint8 -> two [c].
    Units: fractions of full white.
    """
    pixels = images.reshape(-1, images.shape[-1]) / 255
    mean = tuple(round(float(mean), 4) for mean in pixels.mean(0))
    return mean, tuple(max(round(float(deviation), 4), 1e-3) for deviation in pixels.std(0))


_NAMES = ("digits", "digits-sum", "shapes")
_Parts = tuple[np.ndarray, np.ndarray, tuple[str, ...]]
_Source = Callable[[str, Preprocessing | None, int], _Parts]


def _source(name: str, also: Sequence[str]) -> _Source:
    from saccade.models.data.digits import digits, digits_sum
    from saccade.models.data.user_data import folder, npz

    if name == "digits":
        return lambda split, preprocessing, side_px: digits(split)
    if name == "digits-sum":
        return lambda split, preprocessing, side_px: digits_sum(split)
    if name == "shapes":
        return lambda split, preprocessing, side_px: _shapes(split, preprocessing)
    path = Path(name)
    if path.is_dir():
        return lambda split, preprocessing, side_px: folder(path, split, preprocessing, side_px)
    if path.is_file() and path.suffix == ".npz":
        return lambda split, preprocessing, side_px: npz(path, split)
    kind = "a file that is not an .npz" if path.is_file() else "neither a name nor a path"
    raise SaccadeError(
        f"data '{name}': found {kind}.{did_you_mean(name, (*_NAMES, *also))} "
        f"Pass {', '.join((*_NAMES, *also))}, a folder of class folders, or an .npz with images "
        "and labels."
    )


def _shapes(split: str, preprocessing: Preprocessing | None) -> _Parts:
    """Load scenes with one object; the class is its color and shape."""
    from saccade.models.data.scene_labels import SCENE_LABELS, scene_label
    from saccade.models.data.shapes import scenes

    side_px = 64 if preprocessing is None else preprocessing.height_px
    drawn = scenes(split, side_px=side_px, objects=(1, 1))
    labels = np.array([scene_label(objects) for objects in drawn.objects], dtype=np.int64)
    return drawn.images, labels, SCENE_LABELS


def _digest(images: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((images.shape, class_names)).encode())
    digest.update(images.tobytes())
    digest.update(labels.tobytes())
    return digest.hexdigest()
