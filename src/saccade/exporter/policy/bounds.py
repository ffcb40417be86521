# SPDX-License-Identifier: Apache-2.0
"""Tests of one hypothesis, "the risk is above this", that hold for any number of samples.

Each p-value is valid for every distribution of independent samples: if the risk is above `risk`,
the chance of a p-value of at most `level` is at most `level`.
"""

import math

import numpy as np

from saccade.errors import SaccadeError, require

_MOST_SAMPLES = 10**8
_PRECISION = 1e-6  # of a bound that is found by bisection
# Of what a bet may lose at most: at 1 a single sample could end the game.
_STAKE = 0.75
_PRIOR_VARIANCE = 0.25  # of a loss in [0, 1] before any sample, the largest there is


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


def betting_p_value(losses: np.ndarray, risk: float, level: float) -> float:
    """Test a mean of losses of any sign: one over the most that a gambler's capital ever reached.

    The gambler bets that the mean is below `risk`, on one sample after the other, with stakes
    that depend on earlier samples only. If the mean is not below it, the game is not in the
    gambler's favor, and capital of 1 / level is reached with a chance of at most `level`. `level`
    tunes the stakes; the p-value is valid whatever it is.
    Shapes: losses [n], from -1 to 1, in an order that does not depend on their values.
    Source: Waudby-Smith and Ramdas 2024 (arXiv 2010.09686), section 4, predictable plug-in.
    """
    n = len(losses)
    if n == 0:
        return 1.0
    x, mean = (np.asarray(losses, np.float64) + 1) / 2, (risk + 1) / 2
    count = np.arange(1, n + 1)
    running_mean = (0.5 + np.cumsum(x)) / (count + 1)
    running_variance = (_PRIOR_VARIANCE + np.cumsum((x - running_mean) ** 2)) / (count + 1)
    variance = np.concatenate([[_PRIOR_VARIANCE], running_variance[:-1]])  # before each sample
    most = _STAKE / max(1 - mean, 1e-12)
    stakes = np.minimum(np.sqrt(2 * math.log(1 / level) / (n * variance)), most)
    capital = np.cumsum(np.log1p(stakes * (mean - x)))
    return float(min(1.0, math.exp(-max(0.0, float(capital.max())))))


def betting_bound(losses: np.ndarray, confidence: float) -> float:
    """Return the smallest risk that `betting_p_value` rejects at this confidence, 1 if it is none.

    Shapes: losses [n], from -1 to 1.
    """
    level = 1 - confidence
    low, high = -1.0, 1.0
    if betting_p_value(losses, high, level) > level:
        return 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if betting_p_value(losses, middle, level) <= level:
            high = middle
        else:
            low = middle
    return high


def samples_needed(rate: float, risk: float, confidence: float) -> int | None:
    """Return how many samples certify a risk if events come at this rate; None if none would do.

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
    low, high = 0, max(1, math.ceil(math.log(level) / math.log1p(-risk))) if risk < 1 else 1
    while binomial_p_value(round(rate * high), high, risk) > level:
        low, high = high, 2 * high
        if high > _MOST_SAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if binomial_p_value(round(rate * middle), middle, risk) <= level:
            high = middle
        else:
            low = middle
    return high
