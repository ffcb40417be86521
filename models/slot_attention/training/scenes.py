# SPDX-License-Identifier: Apache-2.0
"""The pictures that slot attention learns from, with the true segments of those it is tested on."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.data.datasets import load_data
from saccade.models.data.shapes import scene_batch, scenes
from saccade.models.data.tetrominoes import PIECES, tetromino_batch, tetrominoes
from saccade.models.training.options import TrainOptions

SOURCE_FIELDS = ("positions", "side_px")  # of --set, for generated scenes
_SIDES = {"tetrominoes": 20, "shapes": 32}
# The functions of each world: a fixed split, and scenes without end.
_DRAWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tetrominoes": (tetrominoes, tetromino_batch),
    "shapes": (scenes, scene_batch),
}
_MOST_OBJECTS = {"tetrominoes": PIECES, "shapes": 4}


@dataclass(frozen=True)
class SceneSource:
    """Pictures to learn from and to score.

    Shapes: draw(rng, n) -> images [n h w c] uint8; validation: suffix of the score's name,
            images, masks [n h w] uint8 or None; calibration(n) -> arrays by name.
    """

    name: str
    sha256: Mapping[str, str]
    fields: Mapping[str, Any]  # of the configuration
    draw: Callable[[np.random.Generator, int], np.ndarray]
    validation: tuple[tuple[str, np.ndarray, np.ndarray | None], ...]
    calibration: Callable[[int], dict[str, np.ndarray]]


def scene_source(options: TrainOptions, validation: int) -> SceneSource:
    """The source that the options name; none: tetrominoes.

    Raises: SaccadeError if there is no such data, or --set has fields that it does not.
    """
    name = options.data or "tetrominoes"
    if name in _SIDES:
        return _generated(name, options, validation)
    given = sorted(set(SOURCE_FIELDS) & set(options.set))
    if given:
        raise SaccadeError(
            f"--set {given[0]}: only generated scenes have it, found data '{name}'. "
            "Leave it out, or pass --data tetrominoes or shapes."
        )
    return _pictures(name, options, validation)


def _generated(name: str, options: TrainOptions, validation: int) -> SceneSource:
    side = options.set.get("side_px", _SIDES[name])
    if type(side) is not int:
        raise SaccadeError(f"--set side_px={side}: expected a whole number, such as 20, 24 or 35.")
    positions = options.set.get("positions", "anywhere")
    splits, batches = _DRAWN[name]
    like = splits("validation", validation, side_px=side, positions=positions)
    scored = [("", like.images, like.masks)]
    if positions != "anywhere":
        other = splits("validation", validation, side_px=side)
        scored.append(("_anywhere", other.images, other.masks))

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        images: np.ndarray = batches(rng, count, side_px=side, positions=positions).images
        return images

    def calibration(count: int) -> dict[str, np.ndarray]:
        some = splits("train", count, side_px=side, positions=positions)
        return {"image": some.images, "masks": some.masks}

    # Training scenes are drawn for ever; the split's first ones stand for them.
    train = calibration(256)
    return SceneSource(
        name=name if positions == "anywhere" else f"{name} ({positions})",
        sha256={
            "train": _digest(train["image"], train["masks"]),
            "validation": _digest(like.images, like.masks),
        },
        fields=_fields(name, side),
        draw=draw,
        validation=tuple(scored),
        calibration=calibration,
    )


def _fields(name: str, side: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "height_px": side,
        "width_px": side,
        "decoder_height": side,
        "decoder_width": side,
        "slots": _MOST_OBJECTS[name] + 1,  # one for the background
        "attention": "t-sa",
    }
    if name == "shapes":
        fields |= {"encoder_strides": (2, 1, 1), "attention": "ts-sa"}
    return fields


def _pictures(name: str, options: TrainOptions, validation: int) -> SceneSource:
    training = load_data(name, "train", side_px=options.side_px, also=("tetrominoes",))
    held_out = load_data(name, "validation", side_px=options.side_px)
    images = training.images
    _, height, width, channels = images.shape
    fields = _fields("shapes", height) | {"width_px": width, "decoder_width": width}
    fields |= {"channels": channels, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    return SceneSource(
        name=training.name,
        sha256={"train": training.sha256, "validation": held_out.sha256},
        fields=fields,
        draw=lambda rng, count: images[rng.integers(len(images), size=count)],
        validation=(("", held_out.images[:validation], None),),
        calibration=lambda count: {"image": images[np.arange(count) % len(images)]},
    )


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256(repr([each.shape for each in arrays]).encode())
    for each in arrays:
        digest.update(each.tobytes())
    return digest.hexdigest()
