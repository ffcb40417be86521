# SPDX-License-Identifier: Apache-2.0
"""Tests of one hypothesis, "the risk is above this", that hold for any number of samples.

Each p-value is valid for every distribution of independent samples: if the risk is above `risk`,
the chance of a p-value of at most `level` is at most `level`.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require

MOST_SAMPLES = 10**8  # that a calibration is ever asked for
_PRECISION = 1e-5  # of a bound that is found by bisection
_STEP, _STEPS = 0.02, 15  # of a standard error, in which risks above a bound are tried
_MISSED = 0.01  # of the level: the chance that the interval of a nuisance parameter misses it
_TAIL = 1e-6  # of the level: chance that is not added up, but taken to be against us
_PER_ERROR, _FINER = 4, 17  # rates that are tried in each standard error, and around the best one
_FEWEST = 32  # rates that are tried of few samples, whose error is wide
_RARE = 36  # more rates are tried where at most this number of losses of one sign is expected
_TIE = 1e-9  # relative; scores that differ by rounding are equal
_LEAST = 1e-15
_ROUNDING = 1e-6  # of a count that is the product of a rate and a number of samples


def binomial_p_value(events: int, n: int, risk: float) -> float:
    """Return the chance of at most `events` events in n samples, each with probability `risk`.

    Raises: MissingPackage without SciPy.
    Source: the exact binomial test; Angelopoulos et al. 2021 (arXiv 2110.01052), section 2.
    """
    return float(require("scipy.stats", extra="bench").binom.cdf(events, n, risk))


def binomial_bound(events: int, n: int, confidence: float) -> float:
    """Return the upper bound on the chance of an event, which is 1 for no samples.

    Source: Clopper and Pearson 1934, one-sided.
    """
    if events >= n:
        return 1.0
    beta = require("scipy.stats", extra="bench").beta
    return float(beta.ppf(confidence, events + 1, n - events))


def paired_p_value(lost: int, won: int, n: int, risk: float, level: float) -> float:
    """Test a mean of losses of -1, 0 and 1: the chance of counts as good as these, at the most.

    How many losses are not 0 is a nuisance parameter: their rate `d`. The chance is the largest
    one over a confidence interval of `d`, plus the chance that the interval misses it. It is
    computed at a mean of `risk`; if the mean is above it, the chance is smaller. `level` sets the
    width of the interval; the p-value is valid whatever it is.

    Units:  lost and won count the losses of 1 and of -1 among n.
    Source: Hsueh, Liu and Chen 2001, Biometrics 57(2), with the statistic of Nam 1997, Biometrics
            53(4); the interval as in Berger and Boos 1994, JASA 89(427).
    """
    if n == 0:
        return 1.0
    missed, tail = _MISSED * level, _TAIL * level
    rates = _rates(lost + won, n, risk, missed)
    binom = require("scipy.stats", extra="bench").binom
    first, last = binom.ppf(tail / 2, n, rates[0]), binom.isf(tail / 2, n, rates[-1])
    uneven = np.arange(max(first, 0), last + 1)  # counts of losses that are not 0
    most = _most_lost(uneven, _score(lost, lost + won, n, risk), n, risk)

    def chances(rates: np.ndarray) -> np.ndarray:
        # A mean is at least -rate: if the risk is less, the largest chance is that of -rate.
        shares = np.clip((1 + risk / np.maximum(rates, _LEAST)) / 2, 0, 1)[:, None]
        return (binom.pmf(uneven, n, rates[:, None]) * binom.cdf(most, uneven, shares)).sum(1)

    tried = chances(rates)
    best = int(tried.argmax())
    around = rates[max(best - 1, 0) : best + 2]
    largest = max(tried[best], chances(np.linspace(around[0], around[-1], _FINER)).max())
    return min(1.0, float(largest) + tail + missed)


def paired_bound(lost: int, won: int, n: int, confidence: float) -> float:
    """Return a risk that `paired_p_value` rejects at this confidence, with all above it.

    Each risk orders the counts in its own way, so a rejected risk may have one above it that is not
    rejected, a fraction of a standard error away: these are looked for.
    Units:  lost and won count the losses of 1 and of -1 among n.
    """
    level = 1 - confidence

    def rejects(risk: float) -> bool:
        return paired_p_value(lost, won, n, risk, level) <= level

    if not rejects(1.0):
        return 1.0
    bound = _turn(rejects, -1.0, 1.0)
    mean, rate = (lost - won) / n, (lost + won) / n
    step = _STEP * float(_standard_error(rate, mean, bound)) / math.sqrt(n)
    above = bound + step * np.arange(_STEPS, 0, -1)
    for risk in above[above < 1]:
        if not rejects(float(risk)):
            return _turn(rejects, float(risk), min(1.0, float(risk) + step))
    return bound


def _turn(rejects: Callable[[float], bool], low: float, high: float) -> float:
    """Return a risk that is rejected, next to one that is not; `high` is rejected, `low` is not."""
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


def paired_samples_needed(lost: float, won: float, risk: float, confidence: float) -> int | None:
    """Return how many samples certify a risk at these rates, or None as in `samples_needed`.

    One sample less would not do.
    Units:  lost and won are the shares of the losses of 1 and of -1.
    """
    mean, level = lost - won, 1 - confidence
    if mean >= risk:
        return None
    # The normal approximation of `paired_p_value` tells where to look.
    error = float(_standard_error(lost + won, mean, risk))
    about = (NormalDist().inv_cdf(confidence) * error / (risk - mean)) ** 2
    if about > MOST_SAMPLES:
        return None

    def passes(n: int) -> bool:
        return paired_p_value(_most(lost, n), n - _most(1 - won, n), n, risk, level) <= level

    return _fewest(passes, max(1, math.ceil(about)))


def _rates(uneven: int, n: int, risk: float, missed: float) -> np.ndarray:
    """Return rates of losses that are not 0, all over the interval that may miss the true one.

    No mean is above its rate, so a rate is at least the risk. There, and at -risk, losses of one
    sign are rare, and the chance changes with each of them.
    Shapes: -> [rates], rising.
    Source: Clopper and Pearson 1934, two-sided.
    """
    beta = require("scipy.stats", extra="bench").beta
    low = beta.ppf(missed / 2, uneven, n - uneven + 1) if uneven > 0 else 0.0
    high = beta.isf(missed / 2, uneven + 1, n - uneven) if uneven < n else 1.0
    low, high = max(low, risk), max(high, risk)
    middle = min(max(uneven, 1) / n, 1 - 1 / (2 * n))
    error = math.sqrt(middle * (1 - middle) / n)
    even = np.linspace(low, high, max(_FEWEST, math.ceil(_PER_ERROR * (high - low) / error) + 1))
    rare = abs(risk) + np.arange(0, math.sqrt(_RARE), 1 / _PER_ERROR) ** 2 / n
    return np.unique(np.concatenate([even, rare[(low < rare) & (rare < high)]]))


def _most_lost(uneven: np.ndarray, score: float, n: int, risk: float) -> np.ndarray:
    """Return for each count of losses that are not 0 how many 1 may be among them at this score.

    Shapes: uneven [k] -> [k], -1 where even none is too many.
    """
    low, high = np.full(len(uneven), -1.0), uneven + 1.0  # the score rises with the losses of 1
    limit = score + _TIE * max(1.0, abs(score))
    while (high - low > 1).any():
        middle = np.floor((low + high) / 2)
        good = _score(middle, uneven, n, risk) <= limit
        low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle, low + 1))
    return low


def _score(lost: Any, uneven: Any, n: int, risk: float) -> Any:
    """Return the excess of the mean loss over the risk, in standard errors."""
    mean, rate = (2 * lost - uneven) / n, uneven / n
    return (mean - risk) * math.sqrt(n) / _standard_error(rate, mean, risk)


def _standard_error(rate: Any, mean: Any, risk: float) -> Any:
    """Return the standard error of one loss if the mean is `risk`.

    Source: Nam 1997: its rate of losses that are not 0 is then the likeliest one at that mean.
    """
    half = (rate + risk * mean) / 2
    likeliest = half + np.sqrt(np.maximum(half**2 - risk * mean + (1 - rate) * risk**2, 0))
    return np.sqrt(np.maximum(likeliest - risk**2, _LEAST))


def samples_needed(rate: float, risk: float, confidence: float) -> int | None:
    """Return how many samples certify a risk if events come at this rate.

    It is None if no number would do, or only a larger one than anybody has.

    Raises: SaccadeError unless both are shares and the confidence is between 0 and 1.
    """
    if not (0 <= rate <= 1 and 0 <= risk <= 1 and 0 < confidence < 1):
        raise SaccadeError(
            f"rate {rate:g}, risk {risk:g}, confidence {confidence:g}: expected shares, and a "
            "confidence between 0 and 1. Pass others."
        )
    if rate >= risk:
        return None
    level = 1 - confidence
    none_lost = math.log(level) / math.log1p(-risk) if risk < 1 else 1
    if none_lost > MOST_SAMPLES:
        return None
    return _fewest(
        lambda n: binomial_p_value(_most(rate, n), n, risk) <= level, max(1, math.ceil(none_lost))
    )


def _most(rate: float, n: int) -> int:
    """Return how many of n samples a rate is, rounded up."""
    return math.ceil(rate * n - _ROUNDING)


def _fewest(passes: Callable[[int], bool], about: int) -> int | None:
    """Return a number that passes, next to one that does not; None if it would be too large."""
    low, high = 0, about
    while not passes(high):
        low, high = high, 2 * high
        if high > MOST_SAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
