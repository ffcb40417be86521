# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax: the contracts; the reference is in reference.py."""

import numpy as np

from saccade.core.schema import Range
from saccade.plugins.contract import Attribute, Port, op
from saccade.plugins.tvmax.reference import masked_grids, whole_grids

# The smallest error that float32 can certify; there, a smaller tolerance is raised to it.
SMALLEST_FLOAT32_TOLERANCE = 1e-5

_ATTRIBUTES = (
    Attribute("lam", 0.01, "a finite number >= 0", Range(0)),
    Attribute("tolerance", 1e-6, "a finite number > 0", Range(0, above=True)),
    Attribute("max_iterations", 2000, "a whole number >= 1", Range(1)),
)
_OUTPUTS = (Port("P", "... h w"), Port("error", "...", "float32"))
# The reference is exact to 1e-9; with the default tolerance, answers are at most 1e-6 away.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-3}


@op(
    "saccade::TVMax",
    inputs=(Port("Z", "... h w"),),
    outputs=_OUTPUTS,
    attributes=_ATTRIBUTES,
    tolerance=_TOLERANCE,
)
def tvmax(
    z: np.ndarray, *, lam: float = 0.01, tolerance: float = 1e-6, max_iterations: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """Compute sparse attention over each grid.

    Shapes: z [... h w] -> p [... h w], error [...].
    """
    return whole_grids(z, lam=lam)


@op(
    "saccade::MaskedTVMax",
    inputs=(Port("Z", "... h w"), Port("sizes", "... 2", "int64")),
    outputs=_OUTPUTS,
    attributes=_ATTRIBUTES,
    tolerance=_TOLERANCE,
)
def masked_tvmax(
    z: np.ndarray,
    sizes: np.ndarray,
    *,
    lam: float = 0.01,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute TVMax of the top-left part of each grid.

    Shapes: z [... h w], sizes [... 2] -> p [... h w], 0 outside that part; error [...].
    """
    return masked_grids(z, sizes, lam=lam)
