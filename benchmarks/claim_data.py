# SPDX-License-Identifier: Apache-2.0
"""Data that recipes of claims name as `made:NAME`: written once, from generated sets."""

from collections.abc import Callable

import numpy as np
from PIL import Image
from result_file import BUILD

from saccade.models.data.digits import digits
from saccade.models.data.shapes import SHAPES, distance
from saccade.models.data.tetrominoes import COLOURS, PIECES, tetrominoes

FOLDER = BUILD / "claims" / "data"
Arrays = dict[str, np.ndarray]
_PREFIXES = {"train": "train", "validation": "val", "test": "test"}


def made_data(name: str) -> str:
    """Return a name of data, or the path of the file that `made:NAME` stands for."""
    _, made, which = name.partition("made:")
    if not made:
        return name
    path = FOLDER / f"{which}.npz"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        np.savez(path, **_MADE[which]())
    return str(path)


def _digits_of(lowest: int, most: int) -> Arrays:
    """Return the digits from `lowest` to `most`, with classes from 0."""
    arrays: Arrays = {}
    for split, prefix in _PREFIXES.items():
        images, labels, _ = digits(split)
        kept = (labels >= lowest) & (labels <= most)
        arrays |= {f"{prefix}_images": images[kept], f"{prefix}_labels": labels[kept] - lowest}
    return arrays


def _shifted_digits() -> Arrays:
    """Return each test digit in three ways that training did not show.

    They are noise, a turn by 25 degrees, and the inverse contrast.
    """
    images, labels, _ = digits("test")
    noise = np.random.default_rng(0).normal(0, 50, images.shape)
    noisy = np.clip(images + noise, 0, 255).round().astype(np.uint8)
    turned = np.stack([np.asarray(Image.fromarray(x[..., 0]).rotate(25)) for x in images])
    shifted = np.concatenate([noisy, turned[..., None], 255 - images])
    return {
        "images": shifted,
        "labels": np.tile(labels, 3),
        "split": np.full(3 * len(labels), "test"),
    }


def _few_scenes(count: int) -> Arrays:
    """Return tetrominoes of 14 px, of which only `count` are for training."""
    arrays: Arrays = {}
    for split, prefix in _PREFIXES.items():
        drawn = tetrominoes(split, count if split == "train" else None, side_px=14)
        arrays |= {f"{prefix}_images": drawn.images, f"{prefix}_masks": drawn.masks}
    return arrays


def _sized_scenes(least_px: float, most_px: float, train: int = 64, side: int = 16) -> Arrays:
    """Return scenes of three separate shapes on black whose radii are within these bounds."""
    arrays: Arrays = {}
    for number, (prefix, count) in enumerate({"train": train, "val": 64, "test": 256}.items()):
        rng = np.random.default_rng([301, number])
        palette = np.zeros((count, PIECES + 1, 3), np.uint8)
        palette[:, 1:] = np.array(COLOURS)[rng.integers(len(COLOURS), size=(count, PIECES))]
        masks = np.stack([_separate_shapes(rng, least_px, most_px, side) for _ in range(count)])
        images = palette[np.arange(count)[:, None, None], masks]
        arrays |= {f"{prefix}_images": images, f"{prefix}_masks": masks}
    return arrays


def _separate_shapes(
    rng: np.random.Generator, least_px: float, most_px: float, side: int
) -> np.ndarray:
    """Draw the mask of a scene, its largest shape first; start over where one finds no place."""
    while True:
        mask = np.zeros((side, side), np.uint8)
        for radius in -np.sort(-rng.uniform(least_px, most_px, PIECES)):
            for _ in range(50):
                row, column = rng.uniform(radius, side - radius, 2)
                y, x = np.mgrid[:side, :side] + 0.5
                kind = rng.integers(len(SHAPES), size=1)
                outside = distance(kind, x[None] - column, y[None] - row, np.array([radius]))[0]
                if not mask[outside <= 1].any():  # a pixel between them stays free
                    mask[outside <= 0] = mask.max() + 1
                    break
        if mask.max() == PIECES:
            return mask


_MADE: dict[str, Callable[[], Arrays]] = {
    "digits-shifted": _shifted_digits,
    "digits-0-5": lambda: _digits_of(0, 5),
    "digits-6-9": lambda: _digits_of(6, 9),
    "shapes-middle": lambda: _sized_scenes(1.6, 2.6, train=4_096),
    "shapes-small": lambda: _sized_scenes(1.1, 1.6),
    "shapes-large": lambda: _sized_scenes(2.8, 3.5),
    "tetrominoes-256": lambda: _few_scenes(256),
    "tetrominoes-4096": lambda: _few_scenes(4096),
}
