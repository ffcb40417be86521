# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax: the contracts; the reference is in reference.py."""

from typing import Any

import numpy as np

from saccade.plugins.contract import Attribute, Port, is_tensor, on_arrays, op
from saccade.plugins.tvmax.reference import masked_grids, whole_grids

# What float32 arithmetic can certify; a smaller tolerance is raised to it there.
SMALLEST_FLOAT32_TOLERANCE = 1e-5

_ATTRIBUTES = (
    Attribute("lam", 0.01, "a finite number >= 0", lambda v: 0 <= v < float("inf")),
    Attribute("tolerance", 1e-6, "a finite number > 0", lambda v: 0 < v < float("inf")),
    Attribute("max_iterations", 2000, "a whole number >= 1", lambda v: v >= 1),
)
_OUTPUTS = (Port("P", "... h w"), Port("error", "...", "float32"))
# The reference is exact to 1e-9; an answer at the default tolerance is 1e-6 away at most.
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
    """Shapes: z [... h w] -> p [... h w], error [...]."""
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
    """Shapes: z [... h w], sizes [... 2] -> p [... h w], 0 outside a grid; error [...]."""
    return masked_grids(z, sizes, lam=lam)


@tvmax.public
def _call(
    z: Any,
    lam: float = 0.01,
    sizes: Any = None,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
    return_error: bool = False,
) -> Any:
    """Sparse attention over a grid whose neighbouring cells like to be equal.

    The minimiser over the simplex of 1/2 ||p - z||^2 + lam TV2D(p), which is sparsemax of the
    total-variation proximal point of z.

    Shapes: z [... h w], sizes [... 2] (height, width of the top-left part that takes part)
        -> p [... h w]; with return_error also error [...].
    Units:  z are logits, lam is in logits; tolerance and error are Euclidean distances of p.
    Raises: ShapeError, SaccadeError (lam < 0, sizes that do not fit, another type).
    Source: Martins et al. 2020 (Sparse and Structured Visual Attention), eq. 6, Propositions 1, 2.
    """
    values: dict[str, Any] = {"lam": lam, "tolerance": tolerance, "max_iterations": max_iterations}
    contract, arrays = (tvmax, [z]) if sizes is None else (masked_tvmax, [z, sizes])
    if is_tensor(z):
        # A plain import: torch.compile cannot look through import_module.
        from saccade.plugins.tvmax import eager

        run = eager.tvmax if sizes is None else eager.masked_tvmax
        p, error = run(*arrays, **values)
    else:
        p, error = on_arrays(contract, arrays, values)
    return (p, error) if return_error else p


masked_tvmax.public(
    lambda z, sizes, **attributes: tvmax(z, sizes=sizes, return_error=True, **attributes)
)
