# SPDX-License-Identifier: Apache-2.0
"""SvPN; a call picks the implementation for its input."""

from typing import Any

from saccade.plugins.contract import is_tensor, on_arrays
from saccade.plugins.svpn.contract import svpn


@svpn.public
def _call(q: Any, alpha: float = 0.5) -> Any:
    """Raise singular values to the power alpha, which flattens the spectrum of a matrix.

    Shapes: q [... m n] -> the same.
    Raises: ShapeError, SaccadeError (alpha outside (0, 1], another type).
    Source: Xie et al. 2021 (SoT), eq. 5.
    """
    if is_tensor(q):
        # A plain import: torch.compile cannot trace import_module.
        from saccade.plugins.svpn import eager

        return eager.svpn(q, alpha=alpha)
    return on_arrays(svpn, [q], {"alpha": alpha})[0]
