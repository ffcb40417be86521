# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax; a call picks the implementation for its input."""

from typing import Any

from saccade.plugins.contract import is_tensor, on_arrays
from saccade.plugins.tvmax.contract import masked_tvmax, tvmax


@tvmax.public
def _call(
    z: Any,
    lam: float = 0.01,
    sizes: Any = None,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
    return_error: bool = False,
) -> Any:
    """Compute sparse attention over a grid that favors equal weights in neighboring cells.

    It is the minimizer over the simplex of 1/2 ||p - z||^2 + lam TV2D(p), which is sparsemax of the
    total-variation proximal point of z.

    Shapes: z [... h w], sizes [... 2] (height, width of the top-left part that takes part)
        -> p [... h w]; with return_error also error [...].
    Units: z are logits, lam is in logits; tolerance and error are Euclidean distances of p.
    Raises: ShapeError, SaccadeError (lam < 0, sizes that do not fit, another type).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 6, Propositions 1, 2.
    """
    values: dict[str, Any] = {"lam": lam, "tolerance": tolerance, "max_iterations": max_iterations}
    contract, arrays = (tvmax, [z]) if sizes is None else (masked_tvmax, [z, sizes])
    if is_tensor(z):
        # A plain import: torch.compile cannot trace import_module.
        from saccade.plugins.tvmax import eager

        run = eager.tvmax if sizes is None else eager.masked_tvmax
        p, error = run(*arrays, **values)
    else:
        p, error = on_arrays(contract, arrays, values)
    return (p, error) if return_error else p


masked_tvmax.public(
    lambda z, sizes, **attributes: tvmax(z, sizes=sizes, return_error=True, **attributes)
)
