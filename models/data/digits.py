# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's handwritten digits, alone and four on a canvas."""

from functools import lru_cache

import numpy as np
from saccade.models.data.splits import stratified_split
from saccade.plugins.errors import require

SIDE_PX, CELLS = 8, 3
DIGITS_ON_CANVAS = 4
CANVASES = {"train": 10_000, "validation": 2_000, "test": 5_000}
_SEEDS = {"train": 11, "validation": 12, "test": 13}
CLASS_NAMES = tuple(str(digit) for digit in range(10))


def digits(split: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """1,797 digits, split by class with seed 0 into 998, 200 (validation) and 599 (test).

    Shapes: images [n 8 8 1] uint8, labels [n] int64.
    Units:  the source's 0 to 16 becomes round(255 / 16 v).
    """
    images, labels = _all_digits()
    part = stratified_split(labels, validation=200, test=599)[split]
    return images[part], labels[part], CLASS_NAMES


def digits_sum(split: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Canvases of four digits; the class is their sum modulo 10.

    A canvas of 24x24 px has 3x3 cells of 8x8 px. Four different cells are drawn, each gets one
    digit of the split (the same digit may come twice), five stay black. The splits are those of
    `digits`: no canvas of one split holds a digit image of another. Each split is a fixed draw:
    10,000, 2,000 (validation) and 5,000 (test) canvases; training composes new ones for ever.
    Shapes: images [n 24 24 1] uint8, labels [n] int64.
    """
    images, labels, _ = digits(split)
    rng = np.random.default_rng(_SEEDS[split])
    canvases, counts = compose(images, labels, CANVASES[split], rng)
    return canvases, counts @ np.arange(10) % 10, CLASS_NAMES


def compose(
    images: np.ndarray,
    labels: np.ndarray,
    count: int,
    rng: np.random.Generator,
    present: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """New canvases, and how often each digit is on them.

    Shapes: images [n 8 8 1] uint8, labels [n], present [count] digits on each canvas (none: four)
        -> canvases [count 24 24 1] uint8, counts [count 10] int64.
    """
    chosen = rng.integers(len(images), size=(count, DIGITS_ON_CANVAS))
    cells = rng.random((count, CELLS * CELLS)).argsort(axis=1)[:, :DIGITS_ON_CANVAS]
    if present is None:
        present = np.full(count, DIGITS_ON_CANVAS)
    shown = np.arange(DIGITS_ON_CANVAS) < present[:, None]
    row = np.arange(count)[:, None]
    grid = np.zeros((count, CELLS * CELLS, SIDE_PX, SIDE_PX, 1), dtype=np.uint8)
    grid[row, cells] = images[chosen] * shown[:, :, None, None, None].astype(np.uint8)
    grid = grid.reshape(count, CELLS, CELLS, SIDE_PX, SIDE_PX, 1).swapaxes(2, 3)
    counts = np.zeros((count, 10), dtype=np.int64)
    np.add.at(counts, (row, labels[chosen]), shown.astype(np.int64))
    return grid.reshape(count, CELLS * SIDE_PX, CELLS * SIDE_PX, 1), counts


@lru_cache(maxsize=1)
def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    source = require("sklearn.datasets", extra="bench").load_digits()
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)[..., None]
    return images, source.target.astype(np.int64)
