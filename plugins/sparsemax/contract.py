# SPDX-License-Identifier: Apache-2.0
"""Sparsemax: the contract and its NumPy reference."""

import numpy as np

from saccade.plugins.contract import Port, op


@op(
    "saccade::Sparsemax",
    inputs=(Port("X", "... n"),),
    outputs=(Port("Y", "... n"),),
    tolerance={"float64": 1e-12, "float32": 2e-7, "float16": 1e-3},
)
def sparsemax(x: np.ndarray) -> np.ndarray:
    """Project each row onto the simplex; a row with a NaN or without a finite entry is all NaN.

    Shapes: x [... n] -> the same.
    """
    x = np.asarray(x, np.float64)
    if x.size == 0:
        return x.copy()
    with np.errstate(invalid="ignore"):
        z = x - x.max(axis=-1, keepdims=True)
        top = -np.sort(-z, axis=-1)
        rank = np.arange(1, z.shape[-1] + 1)
        inside = rank * top > np.cumsum(np.where(np.isfinite(top), top, 0), axis=-1) - 1
        count = np.maximum(inside.sum(axis=-1, keepdims=True), 1)
        threshold = (np.where(inside, top, 0).sum(axis=-1, keepdims=True) - 1) / count
        broken = np.isnan(z).any(axis=-1, keepdims=True)
        return np.where(broken, np.nan, np.maximum(z - threshold, 0))
