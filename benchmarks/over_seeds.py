# SPDX-License-Identifier: Apache-2.0
"""The 95 % interval over seeds, which tells what another seed may give."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of one value per seed, its t interval, and whether that excludes 0.

    Raises: ValueError with fewer than two seeds.
    """
    if len(values) < 2:
        raise ValueError(f"seeds: found {len(values)}, expected at least two.")
    mean = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {
        "seeds": len(values),
        "mean": mean,
        "half_width": half,
        "interval": [mean - half, mean + half],
        "shown": abs(mean) > half,
    }


def spoken(result: dict[str, Any]) -> str:
    """Return the interval as text, in the unit of the score, with a verdict."""
    verdict = "shown" if result["shown"] else "not shown"
    return (
        f"{result['mean']:+.3f} +- {result['half_width']:.3f} over {result['seeds']} seeds: "
        f"{verdict}"
    )
