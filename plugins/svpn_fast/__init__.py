# SPDX-License-Identifier: Apache-2.0
"""SvPNFast; a call picks the implementation for its input."""

from typing import Any

from saccade.plugins.contract import is_tensor, on_arrays
from saccade.plugins.svpn_fast.contract import svpn_fast


@svpn_fast.public
def _call(
    q: Any,
    v0: Any,
    alpha: float = 0.5,
    singular_values: int = 1,
    iterations: int = 1,
    epsilon: float = 1e-5,
) -> Any:
    """Approximate SvPN by power iterations: find the first singular values, scale the rest.

    Shapes: q [... m n], v0 [n] (start of each iteration) -> as q.
    Raises: ShapeError, SaccadeError (an attribute out of its range, another type).
    Source: Xie et al. 2021 (SoT), eq. 6 to 8; epsilon = 0 is eq. 8 with 0/0 = 0.
    """
    values: dict[str, Any] = {
        "alpha": alpha,
        "singular_values": singular_values,
        "iterations": iterations,
        "epsilon": epsilon,
    }
    if is_tensor(q):
        # A plain import: torch.compile cannot trace import_module.
        from saccade.plugins.svpn_fast import eager

        return eager.svpn_fast(q, v0, **values)
    return on_arrays(svpn_fast, [q, v0], values)[0]
