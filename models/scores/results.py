# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: scores with their intervals, and the value of each sample."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError
from saccade.plugins.contract import Ops

Z95 = 1.959963984540054
_AT_ONCE = 2_000_000  # drawn indices in memory
# Student's t at 0.975 for 1 to 30 degrees of freedom; beyond, the last is slightly too wide.
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Interval = tuple[float, float]


def samples_for(variance: float, half_width: float) -> int:
    """Return how many samples give a mean a 95 % interval of this half width (normal)."""
    return math.ceil(Z95**2 * variance / half_width**2)


def wilson(successes: float, n: float, z: float = Z95) -> Interval:
    """Return Wilson's score interval of a proportion; `z` is the normal quantile of its level.

    Raises: SaccadeError unless 0 <= successes <= n and n > 0.
    Source: Wilson 1927, without continuity correction.
    """
    if not (n > 0 and 0 <= successes <= n):
        raise SaccadeError(
            f"wilson: {successes} of {n} is not a proportion. Count at least one sample."
        )
    share, z2 = successes / n, z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: np.ndarray, seed: int = 0, *, samples: int = 10_000) -> Interval:
    """Return the percentile interval of the mean under resampling.

    Shapes: values [n], one per sample.
    Raises: ShapeError if it is not a vector of finite numbers, or empty.
    Source: Efron and Tibshirani 1993, section 13.3.
    """
    values = _vector(values)
    draws = _resamples(len(values), samples, np.random.default_rng(seed))
    return _percentiles(np.concatenate([values[rows].mean(1) for rows in draws]))


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int = 0, *, samples: int = 10_000
) -> Interval:
    """Return the percentile interval of mean(a) - mean(b), drawing samples in pairs.

    Shapes: a, b [n], the same sample at the same index; any values, including 0 and 1.
    Raises: ShapeError if they are not two such vectors of equal length.
    """
    a, b = _vector(a), _vector(b)
    if a.shape != b.shape:
        raise ShapeError(
            f"values have shapes {a.shape} and {b.shape}, expected two vectors of equal length. "
            "Measure both on the same samples."
        )
    return bootstrap(a - b, seed, samples=samples)


def bootstrap_of(
    statistic: Callable[[np.ndarray], float], n: int, seed: int = 0, *, samples: int = 1_000
) -> Interval:
    """Return the percentile interval of a `statistic` of drawn indices that is not a mean (BLEU).

    Shapes: statistic takes [n] int64, indices of samples with repetition.
    Raises: SaccadeError if n is 0.
    """
    if n < 1:
        raise SaccadeError("bootstrap: found no sample, expected at least one.")
    draws = _resamples(n, samples, np.random.default_rng(seed))
    return _percentiles(np.array([statistic(row) for rows in draws for row in rows]))


def paired_log_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the interval of the mean of log(a / b) over rounds that measured both in turn.

    Whatever slows a machine for a whole round slows both, so their ratio stays the same. Fewer
    than two rounds give an infinite interval.
    Shapes: a, b [rounds], above 0.
    Source: Student 1908, the paired t interval.
    """
    if len(a) != len(b) or len(a) < 2 or min(*a, *b) <= 0:
        return -math.inf, math.inf
    ratios = np.log(np.asarray(a, np.float64) / np.asarray(b, np.float64))
    spread = float(ratios.std(ddof=1)) / math.sqrt(len(a))
    centre, half = float(ratios.mean()), t975(len(a) - 1) * spread
    return centre - half, centre + half


def t975(freedom: int) -> float:
    """Return Student's t at 0.975, with which an interval has 95 %."""
    return _T975[min(freedom, len(_T975)) - 1]


def _resamples(n: int, samples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    rows = max(1, _AT_ONCE // n)
    for start in range(0, samples, rows):
        yield rng.integers(n, size=(min(rows, samples - start), n))


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


@dataclass(frozen=True)
class Score:
    """One score of an evaluation.

    Units: a share in [0, 1] if the unit is `share`.
    """

    name: str
    value: float
    interval: tuple[float, float] | None  # 95 %; None if the score has no samples
    n: int
    unit: str = "share"
    higher_is_better: bool = True


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of one variant on one task, the main score first.

    Shapes: samples [n], the values whose mean is the first score.
    """

    variant: str
    task: str
    data: str
    data_sha256: str
    scores: tuple[Score, ...]
    samples: np.ndarray = field(repr=False, compare=False)
    protocol: str = ""  # how the answers were obtained, if a task leaves a choice
    split: str = ""  # of the data; empty: the task has one only
    skipped: int = 0  # unreadable rows of it that were left out
    ops: Ops = None  # how custom ops ran; None: there are none, or torch ran them
    # of each sample, if the scores of classes were asked for: a `by_class.ClassAnswers`
    answers: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without the samples."""
        values = asdict(replace(self, answers=None))
        del values["samples"], values["answers"]
        return values if self.answers is None else {**values, "classes": self.answers.classes()}


def proportion(name: str, right: np.ndarray) -> Score:
    """Return the share of right answers with Wilson's interval.

    Shapes: right [n] of 0 and 1.
    """
    n = len(right)
    return Score(name, float(np.mean(right)), wilson(int(np.sum(right)), n), n)


def mean(
    name: str, values: np.ndarray | Sequence[float], *, unit: str = "share", higher: bool = True
) -> Score:
    """Return a mean with its bootstrap interval.

    Shapes: values [n].
    """
    array = np.asarray(values, dtype=np.float64)
    return Score(name, float(array.mean()), bootstrap(array), len(array), unit, higher)
