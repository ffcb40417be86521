# SPDX-License-Identifier: Apache-2.0
"""An op that nobody ships: CONTRIBUTING's steps for one, without its kernels."""

from typing import Any

from fakes.soft_threshold.contract import soft_threshold

from saccade.plugins.contract import is_tensor, on_arrays


@soft_threshold.public
def _call(x: Any, lam: float = 0.5) -> Any:
    """Every number `lam` nearer to 0.

    Shapes: x [... n] -> the same.
    """
    if is_tensor(x):
        from fakes.soft_threshold import eager

        return eager.soft_threshold(x, lam)
    (y,) = on_arrays(soft_threshold, [x], {"lam": lam})
    return y
