# SPDX-License-Identifier: Apache-2.0
"""Soft thresholding: the contract and its NumPy reference."""

import numpy as np

from saccade.core.schema import Range
from saccade.plugins.contract import Attribute, Port, op


@op(
    "saccade::SoftThreshold",
    inputs=(Port("X", "... n"),),
    outputs=(Port("Y", "... n"),),
    attributes=(Attribute("lam", 0.5, "a finite number >= 0", Range(0)),),
    tolerance={"float64": 1e-12, "float32": 2e-7, "float16": 1e-3},
    scale=lambda y: np.abs(y).max(initial=1),
)
def soft_threshold(x: np.ndarray, *, lam: float = 0.5) -> np.ndarray:
    """Shapes: x [... n] -> the same."""
    x = np.asarray(x, np.float64)
    return np.sign(x) * np.maximum(np.abs(x) - lam, 0)
