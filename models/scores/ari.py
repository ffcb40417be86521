# SPDX-License-Identifier: Apache-2.0
"""Agreement of a segmentation with the true one, regardless of how segments are numbered."""

import numpy as np

from saccade.core.errors import ShapeError


def adjusted_rand_index(
    true: np.ndarray,
    predicted: np.ndarray,
    *,
    foreground: bool = False,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """Return the adjusted Rand index per image; with `foreground`, over pixels of true objects.

    It is 1 if the segments agree or nothing can disagree (no valid pixel, or one segment on both
    sides), and about 0 by chance.
    Shapes: true, predicted [b ...] integers (in true, 0 is background), valid [b ...] bool, the
            pixels to count -> float64 [b].
    Raises: ShapeError if the shapes differ.
    Source: Hubert and Arabie 1985; FG-ARI as in Biza et al. 2023, section 4.
    """
    counts = np.ones(true.shape, dtype=bool) if valid is None else valid.astype(bool)
    if not true.shape == predicted.shape == counts.shape:
        raise ShapeError(
            f"true and predicted segments: found shapes {true.shape} and {predicted.shape}, "
            "expected the same. Resize the masks to the size of the true ones."
        )
    if foreground:
        counts = counts & (true > 0)
    triples = zip(true, predicted, counts, strict=True)
    return np.array([_index(t[c], f[c]) for t, f, c in triples], dtype=np.float64)


def _index(true: np.ndarray, predicted: np.ndarray) -> float:
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
