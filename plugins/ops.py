# SPDX-License-Identifier: Apache-2.0
"""Every op by name; importing this module needs only numpy."""

from typing import Any

from saccade.plugins.contract import Op
from saccade.plugins.sparsemax import sparsemax
from saccade.plugins.svpn import svpn
from saccade.plugins.svpn_fast import svpn_fast
from saccade.plugins.tvmax import masked_tvmax, tvmax

OPS: dict[str, Op] = {op.node: op for op in (sparsemax, tvmax, masked_tvmax, svpn, svpn_fast)}


def gfusedmax(z: Any, edges: Any, lam: float = 0.01, **options: Any) -> Any:
    """Compute TVMax on any graph instead of a grid.

    Shapes: z [... n] torch, edges [e 2] (pairs of different vertices) -> p [... n].
    Units: as tvmax.
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), section 2.
    """
    from saccade.plugins.tvmax import graph

    return graph.gfusedmax(z, edges, lam, **options)


__all__ = ["OPS", "gfusedmax", "masked_tvmax", "sparsemax", "svpn", "svpn_fast", "tvmax"]
