# SPDX-License-Identifier: Apache-2.0
"""Agreement of two segmentations of one image; runs in the router, too (NumPy only)."""

import numpy as np


def rand_index(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return the adjusted Rand index of two ways to cut the same points into segments.

    Shapes: true, predicted [points], integers.
    Source: Hubert and Arabie 1985.
    """
    _, rows = np.unique(true, return_inverse=True)
    names, columns = np.unique(predicted, return_inverse=True)
    width = max(1, len(names))
    table = np.bincount(rows * width + columns, minlength=width).astype(np.float64)
    pairs = _pairs(table)
    of_true, of_found = _pairs(np.bincount(rows)), _pairs(np.bincount(columns))
    points = float(len(true))
    expected = of_true * of_found / max(points * (points - 1), 1.0)
    spread = (of_true + of_found) / 2 - expected
    return 1.0 if spread == 0 else float((pairs - expected) / spread)


def _pairs(counts: np.ndarray) -> float:
    """Count the ordered pairs of different pixels in the same segment."""
    numbers = counts.astype(np.float64)
    return float((numbers * (numbers - 1)).sum())
