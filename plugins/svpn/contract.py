# SPDX-License-Identifier: Apache-2.0
"""SvPN: the contract and its NumPy reference."""

import numpy as np

from saccade.core.schema import Range
from saccade.plugins.contract import Attribute, Port, op

# Singular values up to this share of the largest count as 0, by type of the computation.
RANK_THRESHOLD = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-6}
ALPHA = Attribute("alpha", 0.5, "a number in (0, 1]", Range(0, 1, above=True))


def spectral_norm(answer: np.ndarray) -> np.ndarray:
    """Return the largest singular value of each matrix (1 for a zero matrix), the scale of errors.

    Shapes: answer [... m n] -> [... 1 1].
    """
    if answer.size == 0:
        return np.ones((*answer.shape[:-2], 1, 1))
    largest = np.linalg.norm(answer.astype(np.float64), 2, axis=(-2, -1), keepdims=True)
    return np.where(largest > 0, largest, 1.0)


@op(
    "saccade::SvPN",
    inputs=(Port("Q", "... m n"),),
    outputs=(Port("Y", "... m n"),),
    attributes=(ALPHA,),
    tolerance={"float64": 1e-11, "float32": 2e-5, "float16": 2e-3},
    scale=spectral_norm,
)
def svpn(q: np.ndarray, *, alpha: float = 0.5) -> np.ndarray:
    """Raise singular values to the power alpha; a matrix with a non-finite entry is all NaN.

    Shapes: q [... m n] -> the same.
    """
    threshold = RANK_THRESHOLD[np.asarray(q).dtype.name]
    q = np.asarray(q, np.float64)
    if q.size == 0:
        return q.copy()
    finite = np.isfinite(q).all(axis=(-2, -1), keepdims=True)
    u, s, vt = np.linalg.svd(np.where(finite, q, 0), full_matrices=False)
    kept = s > threshold * s[..., :1]
    power = np.where(kept, np.where(kept, s, 1) ** alpha, 0)
    return np.where(finite, (u * power[..., None, :]) @ vt, np.nan)
