# SPDX-License-Identifier: Apache-2.0
"""Sparsemax: the contract and its NumPy reference."""

from typing import Any

import numpy as np

from saccade.plugins.contract import Port, is_tensor, on_arrays, op
from saccade.plugins.errors import ShapeError


@op(
    "saccade::Sparsemax",
    inputs=(Port("X", "... n"),),
    outputs=(Port("Y", "... n"),),
    tolerance={"float64": 1e-12, "float32": 2e-7, "float16": 1e-3},
)
def sparsemax(x: np.ndarray) -> np.ndarray:
    """Shapes: x [... n] -> the same. A row without a finite entry, or with a NaN, is all NaN."""
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


@sparsemax.public
def _call(z: Any, axis: int = -1) -> Any:
    """Nearest point of the simplex to each slice: a softmax that can say zero.

    Shapes: z [... n ...] -> the same; every slice along `axis` is >= 0 and sums to 1.
    Raises: ShapeError if z has no axis `axis`, SaccadeError for another type.
    Source: Martins and Astudillo 2016 (arXiv 1602.02068), Algorithm 1.
    """
    if is_tensor(z):
        # A plain import: torch.compile cannot look through import_module.
        from saccade.plugins.sparsemax import eager

        return eager.sparsemax(z, axis)
    array = np.asarray(z)
    if not -array.ndim <= axis < array.ndim:
        raise ShapeError(
            f"{sparsemax.name}: axis is {axis}, expected one of the {array.ndim} axes "
            f"of X {list(array.shape)}."
        )
    (weights,) = on_arrays(sparsemax, [np.moveaxis(array, axis, -1)], {})
    return np.moveaxis(weights, -1, axis)
