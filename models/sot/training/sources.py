# SPDX-License-Identifier: Apache-2.0
"""Labelled images or texts for a classifier: scenes of one object drawn for ever, a data set, the
states that a language model gave a text's tokens.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.data.augment import Augmentation
from saccade.models.data.datasets import calibration_rows, load_data, pixel_moments
from saccade.models.data.scene_labels import SCENE_LABELS, scene_label
from saccade.models.data.shapes import Scenes, scene_batch, scenes
from saccade.models.data.token_states import TokenStates, token_states
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


@dataclass(frozen=True)
class TextSource:
    """The texts of both splits, as an `ImageSource` holds images."""

    train: TokenStates
    held_out: TokenStates
    samples: int  # for calibration

    @property
    def name(self) -> str:
        """Of the data, for the card."""
        return self.train.name

    @property
    def sha256(self) -> Mapping[str, str]:
        """By split."""
        return {"train": self.train.sha256, "validation": self.held_out.sha256}

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the labels."""
        return self.train.class_names

    @property
    def validation(self) -> Labelled:
        """Inputs by name, and labels [n]."""
        return self.held_out.inputs, self.held_out.labels

    @property
    def calibration(self) -> Labelled:
        """Training texts, the same on every call."""
        rows = calibration_rows(len(self.train.labels), self.samples)
        return _rows(self.train, rows)

    def draw(self, rng: np.random.Generator, count: int) -> Labelled:
        """Texts of the training part at random."""
        return _rows(self.train, rng.integers(len(self.train.labels), size=count))

    def fields(self) -> dict[str, Any]:
        """What the data decides about the configuration; a text's states have no trunk here."""
        _, most, width = self.train.tokens.shape
        return {
            "input": "tokens",
            "max_tokens": most,
            "dim": width,
            "classes": len(self.class_names),
            "heads": 1,
        }


def _rows(data: TokenStates, rows: np.ndarray) -> Labelled:
    return {name: each[rows] for name, each in data.inputs.items()}, data.labels[rows]


def text_source(options: TrainOptions, *, calibration: int) -> TextSource:
    """The token states in the .npz that the options name.

    Raises: SaccadeError if there is none, it cannot be used, or `--set` contradicts it.
    """
    if options.data is None:
        raise SaccadeError(
            "--set input=tokens: texts come as the states of a language model, and none are "
            "generated here. Pass --data with an .npz of tokens, lengths and labels."
        )
    source = TextSource(
        token_states(options.data, "train"), token_states(options.data, "validation"), calibration
    )
    fields = source.fields()
    for name in ("max_tokens", "dim", "classes"):
        if options.set.get(name, fields[name]) != fields[name]:
            raise SaccadeError(
                f"--set {name}={options.set[name]}: the data says {fields[name]}. Leave it out."
            )
    return source
