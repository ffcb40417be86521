# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's handwritten digits, alone and four on a canvas."""

from functools import lru_cache

import numpy as np

from saccade.core.errors import require
from saccade.models.data.splits import stratified_split

SIDE_PX, QUADRANT_PX, QUADRANTS = 8, 12, 4
CANVASES = {"train": 10_000, "validation": 2_000, "test": 5_000}
_SEEDS = {"train": 11, "validation": 12, "test": 13}
CLASS_NAMES = tuple(str(digit) for digit in range(10))


def digits(split: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Load 1,797 digits, split by class with seed 0 into 998, 200 (validation) and 599 (test).

    Shapes: images [n 8 8 1] uint8, labels [n] int64.
    Units:  the source's values v from 0 to 16 become round(255 / 16 v).
    """
    images, labels = _all_digits()
    part = stratified_split(labels, validation=200, test=599)[split]
    return images[part], labels[part], CLASS_NAMES


def digits_sum(split: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Compose canvases of four digits; the class is their sum modulo 10.

    A canvas of 24x24 px has 2x2 quadrants of 12x12 px on black. In the middle of each is one digit
    of the split, drawn independently (the same one may occur twice). The splits are those of
    `digits`: no canvas of one split shows a digit image of another. Each split is a fixed draw of
    10,000, 2,000 (validation) or 5,000 (test) canvases; training composes new ones without end.
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
    """Compose new canvases, and count how often each digit is on them.

    Shapes: images [n 8 8 1] uint8, labels [n], present [count] digits per canvas (None: four)
        -> canvases [count 24 24 1] uint8, counts [count 10] int64.
    """
    chosen = rng.integers(len(images), size=(count, QUADRANTS))
    rank = rng.random((count, QUADRANTS)).argsort(axis=1)
    shown = rank < (QUADRANTS if present is None else present[:, None])
    placed = images[chosen] * shown[:, :, None, None, None].astype(np.uint8)
    margin = (QUADRANT_PX - SIDE_PX) // 2
    around = ((0, 0), (0, 0), (margin, margin), (margin, margin), (0, 0))
    grid = np.pad(placed, around).reshape(count, 2, 2, QUADRANT_PX, QUADRANT_PX, 1)
    counts = np.zeros((count, 10), dtype=np.int64)
    np.add.at(counts, (np.arange(count)[:, None], labels[chosen]), shown.astype(np.int64))
    return grid.swapaxes(2, 3).reshape(count, 2 * QUADRANT_PX, 2 * QUADRANT_PX, 1), counts


@lru_cache(maxsize=1)
def _all_digits() -> tuple[np.ndarray, np.ndarray]:
    source = require("sklearn.datasets", extra="bench").load_digits()
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)[..., None]
    return images, source.target.astype(np.int64)
