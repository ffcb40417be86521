# SPDX-License-Identifier: Apache-2.0
"""SvPN: calling it picks the implementation for what it is given."""

from typing import Any

from saccade.plugins.contract import is_tensor, on_arrays
from saccade.plugins.svpn.contract import svpn


@svpn.public
def _call(q: Any, alpha: float = 0.5) -> Any:
    """Singular values to the power alpha: flattens a matrix's spectrum, keeps its directions.

    Shapes: q [... m n] -> the same.
    Raises: ShapeError, SaccadeError (alpha outside (0, 1], another type).
    Source: Xie et al. 2021 (SoT), eq. 5.
    """
    if is_tensor(q):
        # A plain import: torch.compile cannot look through import_module.
        from saccade.plugins.svpn import eager

        return eager.svpn(q, alpha=alpha)
    return on_arrays(svpn, [q], {"alpha": alpha})[0]
