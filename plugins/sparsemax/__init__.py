# SPDX-License-Identifier: Apache-2.0
"""Sparsemax; a call picks the implementation for its input."""

from typing import Any

import numpy as np

from saccade.core.errors import ShapeError
from saccade.plugins.contract import is_tensor, on_arrays
from saccade.plugins.sparsemax.contract import sparsemax


@sparsemax.public
def _call(z: Any, axis: int = -1) -> Any:
    """Project each slice onto the simplex: a softmax that can give exact zeros.

    Shapes: z [... n ...] -> the same; every slice along `axis` is >= 0 and sums to 1.
    Raises: ShapeError if z has no axis `axis`, SaccadeError for another type.
    Source: Martins and Astudillo 2016 (arXiv 1602.02068), Algorithm 1.
    """
    if is_tensor(z):
        # A plain import: torch.compile cannot trace import_module.
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
