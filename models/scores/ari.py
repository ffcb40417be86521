# SPDX-License-Identifier: Apache-2.0
"""Agreement of a segmentation with the true one, regardless of how segments are numbered."""

import numpy as np

from saccade.core.errors import ShapeError
from saccade.models.rand_index import rand_index


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
    Source: Hubert and Arabie 1985; FG-ARI as in Biza et al. 2022, section 3.
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
    return np.array([rand_index(t[c], f[c]) for t, f, c in triples], dtype=np.float64)
