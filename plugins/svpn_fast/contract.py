# SPDX-License-Identifier: Apache-2.0
"""SvPNFast: the contract and its NumPy reference."""

import numpy as np

from saccade.core.schema import Range
from saccade.plugins.contract import Attribute, Port, op
from saccade.plugins.svpn.contract import ALPHA, spectral_norm

# A vector shorter than this is not normalized.
SMALLEST_NORM = 1e-12


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), SMALLEST_NORM)


@op(
    "saccade::SvPNFast",
    inputs=(Port("Q", "... m n"), Port("v0", "n")),
    outputs=(Port("Y", "... m n"),),
    attributes=(
        ALPHA,
        Attribute("singular_values", 1, "a whole number >= 0 (0: all)", Range(0)),
        Attribute("iterations", 1, "a whole number >= 1", Range(1)),
        Attribute("epsilon", 1e-5, "a finite number >= 0", Range(0)),
    ),
    tolerance={"float64": 1e-10, "float32": 2e-5, "float16": 4e-3},
    scale=spectral_norm,
)
def svpn_fast(
    q: np.ndarray,
    v0: np.ndarray,
    *,
    alpha: float = 0.5,
    singular_values: int = 1,
    iterations: int = 1,
    epsilon: float = 1e-5,
) -> np.ndarray:
    """Approximate SvPN by power iterations from v0.

    Shapes: q [... m n], v0 [n] -> as q.
    """
    rest, start = np.asarray(q, np.float64).copy(), np.asarray(v0, np.float64)
    total = np.zeros_like(rest)
    s = np.zeros((*rest.shape[:-2], 1))
    for _ in range(singular_values or min(rest.shape[-2:])):
        v = np.broadcast_to(start, (*rest.shape[:-2], rest.shape[-1]))
        for _ in range(iterations):
            u = _unit(np.einsum("...mn,...n->...m", rest, v))
            v = _unit(np.einsum("...mn,...m->...n", rest, u))
        s = np.einsum("...m,...mn,...n->...", u, rest, v)[..., None]
        outer = u[..., :, None] * v[..., None, :]
        total += s[..., None] ** alpha * outer
        rest -= s[..., None] * outer
    if singular_values == 0:
        return total
    divisor = s[..., None] ** (1 - alpha) + epsilon
    return total + np.where(divisor > 0, rest / np.where(divisor > 0, divisor, 1), 0)
