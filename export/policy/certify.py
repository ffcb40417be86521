# SPDX-License-Identifier: Apache-2.0
"""Learn then Test: the cheapest chain of variants whose risk is certified.

Source: Angelopoulos et al. 2021 (arXiv 2110.01052), fixed-sequence testing on a sequence that was
learned from other samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, takewhile
from statistics import NormalDist

import numpy as np

from saccade.exporter.policy.answers import LEARN_SHARE, MEASURES, Answers
from saccade.exporter.policy.bounds import (
    binomial_bound,
    binomial_p_value,
    paired_bound,
    paired_p_value,
    paired_samples_needed,
    samples_needed,
)
from saccade.exporter.policy.chains import Chain, front
from saccade.exporter.policy.options import Against

_ROUNDING = 1e-9
# Chains that are tested one after the other often lose and gain as many samples.
_p_value = lru_cache(4096)(paired_p_value)
_bound = lru_cache(4096)(paired_bound)


@dataclass(frozen=True)
class Certified:
    """A chain whose risk is at most `risk`, with the confidence of the test.

    Units:  risk, bound and observed are shares of samples; `bound` is the upper confidence bound
            on the samples that certify, `observed` the mean loss there. `seconds` is the mean time
            per sample on all samples that are like the traffic.
    """

    risk: float
    chain: Chain
    bound: float
    observed: float
    seconds: float
    shares: tuple[float, ...]


@dataclass(frozen=True)
class NotCertified:
    """No chain that is cheaper than the full model passed; what was reached, and what would do.

    `samples` is the number of calibration samples at which the best chain would pass if its risk
    is what was observed, without those of other data that chose; None if no number would do.
    """

    risk: float
    bound: float
    samples: int | None


def least_samples(
    risk: float, confidence: float, against: Against, *, apart: bool = False
) -> int | None:
    """Return how many calibration samples certify a risk if not one answer is lost.

    It is None for a risk so small that nobody has as many.

    With `apart`, all of them certify; else a part of them chooses.

    Fewer certify nothing, not even answers that are better than the full model's: the chains that
    are tested begin with one that always ends in the full model, which loses and gains nothing.
    """
    if against == "full":
        needed = samples_needed(0.0, risk, confidence)
    else:
        needed = paired_samples_needed(0.0, 0.0, risk, confidence)
    return needed if apart or needed is None else _in_all(needed)


def certify(
    answers: Answers,
    risks: Sequence[float],
    *,
    confidence: float,
    against: Against,
    steps: int,
) -> list[Certified | NotCertified]:
    """Find for each risk the cheapest chain that passes, each at this confidence of its own.

    The learning samples order the candidates from the most expensive to the cheapest; the testing
    samples go through them in that order and stop at the first that fails. A risk of 0 is that of
    the full model itself, which needs no test.

    Raises: SaccadeError if labels are needed and missing.
    """
    table = answers.differs if against == "full" else answers.lost
    test = _Test(confidence, against)
    chains = front(answers.learning, table[:, : answers.learn], steps)
    testing = answers.testing
    tried = [
        _Tried(
            chain,
            chain.losses(testing, table[:, answers.learn :]),
            chain.seconds(answers.like_traffic),
        )
        for chain in chains
    ]
    return [_chosen(answers, tried, risk, test) for risk in risks]


@dataclass(frozen=True)
class _Tried:
    """A candidate with its losses on the testing samples."""

    chain: Chain
    losses: np.ndarray
    seconds: float


@dataclass(frozen=True)
class _Test:
    """The test that fits the losses: 0 and 1 against the full model; -1, 0, 1 against labels."""

    confidence: float
    against: Against

    def passes(self, losses: np.ndarray, risk: float) -> bool:
        """Return whether "the risk is above `risk`" is rejected."""
        level, (lost, won, n) = 1 - self.confidence, _counts(losses)
        if self.against == "full":
            return binomial_p_value(lost, n, risk) <= level
        return _p_value(lost, won, n, risk, level) <= level

    def bound(self, losses: np.ndarray) -> float:
        """Return the upper confidence bound on the mean loss."""
        lost, won, n = _counts(losses)
        if self.against == "full":
            return binomial_bound(lost, n, self.confidence)
        return _bound(lost, won, n, self.confidence)

    def near(self, losses: np.ndarray) -> float:
        """Return about what the bound is, which is enough to compare."""
        error = float(losses.std()) / math.sqrt(len(losses))
        return float(losses.mean()) + NormalDist().inv_cdf(self.confidence) * error

    def samples_needed(self, losses: np.ndarray, risk: float) -> int | None:
        """Return how many testing samples would do if the risk is what was observed."""
        lost, won, n = _counts(losses)
        if self.against == "full":
            return samples_needed(lost / n, risk, self.confidence)
        return paired_samples_needed(lost / n, won / n, risk, self.confidence)


def _chosen(
    answers: Answers, tried: Sequence[_Tried], risk: float, test: _Test
) -> Certified | NotCertified:
    # A mean of equal times may be less than each of them, by rounding.
    full_seconds = answers.variants[answers.full].seconds * (1 - _ROUNDING)
    passed = list(takewhile(lambda one: test.passes(one.losses, risk), tried))
    cheaper = [one for one in passed if one.seconds < full_seconds]
    if cheaper:
        best = min(cheaper, key=lambda one: one.seconds)
        # Bounds are found to a precision; that this risk is rejected is known.
        return _certified(
            answers, best.chain, risk, best.losses, min(risk, test.bound(best.losses))
        )
    if risk == 0:
        full = Chain((answers.full,), MEASURES[0], ())
        return _certified(answers, full, risk, np.zeros(1), 0.0)
    nearest = min(
        (one for one in tried if one.seconds < full_seconds),
        key=lambda one: test.near(one.losses),
        default=tried[-1],
    )
    if test.passes(nearest.losses, risk) and len(passed) < len(tried):
        nearest = tried[len(passed)]  # the one that ended the sequence
    needed = test.samples_needed(nearest.losses, risk)
    least = least_samples(risk, test.confidence, test.against, apart=answers.apart)
    if needed is not None and least is not None:
        needed = max(needed if answers.apart else _in_all(needed), least)
    return NotCertified(risk, test.bound(nearest.losses), needed)


def _certified(
    answers: Answers, chain: Chain, risk: float, losses: np.ndarray, bound: float
) -> Certified:
    return Certified(
        risk=risk,
        chain=chain,
        bound=bound,
        observed=float(losses.mean()),
        seconds=chain.seconds(answers.like_traffic),
        shares=chain.shares(answers.like_traffic),
    )


def _counts(losses: np.ndarray) -> tuple[int, int, int]:
    """Return how many losses are 1, how many are -1, and how many there are."""
    return int((losses > 0).sum()), int((losses < 0).sum()), len(losses)


def _in_all(tested: int) -> int:
    """Return how many calibration samples are needed for this many to certify."""
    least = math.floor(tested / (1 - LEARN_SHARE)) - 1  # the share is of a rounded number
    return next(n for n in count(least) if n - round(LEARN_SHARE * n) >= tested)
