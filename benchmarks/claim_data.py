# SPDX-License-Identifier: Apache-2.0
"""Data that recipes of claims name as `made:NAME`: written once, from generated sets."""

from collections.abc import Callable

import numpy as np
from PIL import Image
from result_file import BUILD

from saccade.models.data.digits import digits
from saccade.models.data.tetrominoes import tetrominoes

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


_MADE: dict[str, Callable[[], Arrays]] = {
    "digits-shifted": _shifted_digits,
    "digits-0-5": lambda: _digits_of(0, 5),
    "digits-6-9": lambda: _digits_of(6, 9),
    "tetrominoes-256": lambda: _few_scenes(256),
    "tetrominoes-4096": lambda: _few_scenes(4096),
}
