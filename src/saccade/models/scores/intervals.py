# SPDX-License-Identifier: Apache-2.0
"""95 % intervals: of a proportion, of a mean, of a difference on the same samples."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from saccade.errors import SaccadeError, ShapeError

_Z95 = 1.959963984540054
_AT_ONCE = 2_000_000  # drawn indices held in memory
Interval = tuple[float, float]


def wilson(successes: int, n: int) -> Interval:
    """The score interval of a proportion.

    Raises: SaccadeError unless 0 <= successes <= n and n > 0.
    Source: Wilson 1927, without continuity correction.
    """
    if not (n > 0 and 0 <= successes <= n):
        raise SaccadeError(
            f"wilson: {successes} of {n} is not a proportion. Count at least one sample."
        )
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: np.ndarray, seed: int = 0, *, samples: int = 10_000) -> Interval:
    """The percentile interval of the mean under resampling.

    Shapes: values [n], one a sample.
    Raises: ShapeError if it is not a vector of finite numbers, or empty.
    Source: Efron and Tibshirani 1993, section 13.3.
    """
    values = _vector(values)
    draws = _resamples(len(values), samples, np.random.default_rng(seed))
    return _percentiles(np.concatenate([values[rows].mean(1) for rows in draws]))


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int = 0, *, samples: int = 10_000
) -> Interval:
    """The percentile interval of mean(a) - mean(b), samples drawn in pairs.

    Shapes: a, b [n], the same sample at the same place; any values, 0 and 1 included.
    Raises: ShapeError if they are not two such vectors of one length.
    """
    a, b = _vector(a), _vector(b)
    if a.shape != b.shape:
        raise ShapeError(
            f"values have shapes {a.shape} and {b.shape}, expected two vectors of one length. "
            "Take both on the same samples."
        )
    return bootstrap(a - b, seed, samples=samples)


def bootstrap_of(
    statistic: Callable[[np.ndarray], float], n: int, seed: int = 0, *, samples: int = 1_000
) -> Interval:
    """The percentile interval of what is not a mean, such as BLEU: `statistic` of drawn indices.

    Shapes: statistic takes [n] int64, places of samples with repetition.
    Raises: SaccadeError if n is 0.
    """
    if n < 1:
        raise SaccadeError("bootstrap: found no sample, expected at least one.")
    draws = _resamples(n, samples, np.random.default_rng(seed))
    return _percentiles(np.array([statistic(row) for rows in draws for row in rows]))


def _resamples(n: int, samples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    rows = max(1, _AT_ONCE // n)
    for done in range(0, samples, rows):
        yield rng.integers(n, size=(min(rows, samples - done), n))


def _percentiles(estimates: np.ndarray) -> Interval:
    low, high = np.percentile(estimates, (2.5, 97.5))
    return float(low), float(high)


def _vector(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ShapeError(
            f"values: found shape {values.shape}, expected a vector of at least one finite number."
        )
    return values
