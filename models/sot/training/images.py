# SPDX-License-Identifier: Apache-2.0
"""Labelled images for a classifier: scenes of one object, drawn for ever, or a data set."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.models.data.augment import Augmentation
from saccade.models.data.datasets import calibration_rows, load_data, pixel_moments
from saccade.models.data.scene_labels import SCENE_LABELS, scene_label
from saccade.models.data.shapes import Scenes, scene_batch, scenes
from saccade.models.training.options import TrainOptions

Labelled = tuple[dict[str, np.ndarray], np.ndarray]  # inputs by name, labels
SCENE_PX = 48  # 256 for calibration stay within the 3 MiB of a shipped file
_SEEN = 1_000  # images that tell mean and deviation
_ONE = (1, 1)  # object a scene


@dataclass(frozen=True)
class ImageSource:
    """Where training and validation images come from.

    Shapes: draw answers {"image": [n h w c] uint8} and labels [n] int64, validation and
            calibration hold the same.
    """

    name: str
    sha256: Mapping[str, str]
    class_names: tuple[str, ...]
    draw: Callable[[np.random.Generator, int], Labelled]
    validation: Labelled
    calibration: Labelled
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def fields(self) -> dict[str, Any]:
        """What the data decides about the configuration; about 8 tokens on a side."""
        _, height, width, channels = self.validation[0]["image"].shape
        return {
            "height_px": height,
            "width_px": width,
            "channels": channels,
            "patch_px": patch_side(height, width),
            "mean": self.mean,
            "std": self.std,
            "classes": len(self.class_names),
        }


def image_source(options: TrainOptions, *, validation: int, calibration: int) -> ImageSource:
    """The source that the options name: `shapes` (the default), digits, a folder, or an .npz.

    Raises: SaccadeError if there is no such data.
    """
    name = options.data or "shapes"
    if name == "shapes":
        return _shapes(validation, calibration)
    training = load_data(name, "train", side_px=options.side_px)
    held_out = load_data(name, "validation", side_px=options.side_px)
    images, labels = training.images, training.labels
    jitter = Augmentation(shift_px=images.shape[1] / 12, degrees=10, zoom=0.1)

    def draw(rng: np.random.Generator, count: int) -> Labelled:
        chosen = rng.integers(len(labels), size=count)
        return {"image": jitter(images[chosen], rng)}, labels[chosen]

    some = calibration_rows(len(labels), calibration)
    mean, std = pixel_moments(images[:_SEEN])
    return ImageSource(
        name=training.name,
        sha256={"train": training.sha256, "validation": held_out.sha256},
        class_names=training.class_names,
        draw=draw,
        validation=({"image": held_out.images}, held_out.labels),
        calibration=({"image": images[some]}, labels[some]),
        mean=mean,
        std=std,
    )


def patch_side(height: int, width: int) -> int:
    """The common divisor of both sides, at least 2 where there is one, nearest to an eighth.

    Units: pixels.
    """
    common = math.gcd(height, width)
    divisors = [each for each in range(2, common + 1) if common % each == 0] or [1]
    return min(divisors, key=lambda each: abs(each - max(height, width) / 8))


def _shapes(validation: int, calibration: int) -> ImageSource:
    held_out = scenes("validation", validation, side_px=SCENE_PX, objects=_ONE)
    known = scenes("train", calibration, side_px=SCENE_PX, objects=_ONE)
    mean, std = pixel_moments(known.images)

    def draw(rng: np.random.Generator, count: int) -> Labelled:
        return _labelled(scene_batch(rng, count, side_px=SCENE_PX, objects=_ONE))

    return ImageSource(
        name="shapes",
        sha256={"train": _digest(known.images), "validation": _digest(held_out.images)},
        class_names=SCENE_LABELS,
        draw=draw,
        validation=_labelled(held_out),
        calibration=_labelled(known),
        mean=mean,
        std=std,
    )


def _labelled(drawn: Scenes) -> Labelled:
    labels = np.array([scene_label(objects) for objects in drawn.objects], np.int64)
    return {"image": drawn.images}, labels


def _digest(images: np.ndarray) -> str:
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()
