# SPDX-License-Identifier: Apache-2.0
"""Learn then Test: chains of variants, and the cheapest one whose risk is certified.

Source: Angelopoulos et al. 2021 (arXiv 2110.01052), fixed-sequence testing on a sequence that was
learned from other samples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, count, takewhile
from operator import gt
from statistics import NormalDist
from typing import Annotated, NamedTuple

import numpy as np

from saccade.core.schema import Count, Range
from saccade.exporter.policy.answers import LEARN_SHARE, MEASURES, Answers, stops
from saccade.exporter.policy.bounds import (
    binomial_bound,
    binomial_p_value,
    paired_bound,
    paired_p_value,
    paired_samples_needed,
    samples_needed,
)
from saccade.exporter.policy.options import Against

_LEVELS = 48  # thresholds of a step that are tried: quantiles of its confidence
_LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class Chain:
    """Variants in the order in which they run, and the confidence at which each one stops.

    The last variant always answers, so there is one threshold fewer than there are steps.
    """

    steps: tuple[int, ...]  # indices into the variants of `Answers`
    measure: str
    thresholds: tuple[float, ...]
    early: tuple[int, ...] | None = None  # classes of which an answer may stop; None: all

    def above(self, other: "Chain") -> bool:
        """Return whether it differs in higher thresholds alone."""
        alike = replace(self, thresholds=other.thresholds) == other
        return alike and all(map(gt, self.thresholds, other.thresholds))

    def ends(self, answers: Answers) -> np.ndarray:
        """Return the step at which each sample ends.

        Shapes: -> int64 [n], from 0.
        """
        confidence = answers.confidence[MEASURES.index(self.measure)]
        ends = np.full(answers.n, len(self.steps) - 1)
        for at in reversed(range(len(self.thresholds))):
            step, threshold = self.steps[at], self.thresholds[at]
            ends[stops(confidence[step], threshold, answers.classes[step], self.early)] = at
        return ends

    def losses(self, answers: Answers, table: np.ndarray) -> np.ndarray:
        """Return each sample's loss under the variant that answers it.

        Shapes: table [v n] -> [n].
        """
        steps = np.array(self.steps)[self.ends(answers)]
        return np.take_along_axis(table, steps[None], axis=0)[0]

    def shares(self, answers: Answers) -> tuple[float, ...]:
        """Return the share of samples that end at each step."""
        ends = self.ends(answers)
        return tuple(float((ends == step).mean()) for step in range(len(self.steps)))

    def seconds(self, answers: Answers) -> float:
        """Return the mean time per sample: that of every variant that it was put to."""
        spent = np.cumsum([answers.variants[step].seconds for step in self.steps])
        return float(spent[self.ends(answers)].mean())


@dataclass(frozen=True)
class ChainCandidate:
    """A chain with what it costs and loses on the samples that choose."""

    chain: Chain
    seconds: float
    loss: float


def front(
    answers: Answers, table: np.ndarray, most_steps: int, *, to_full: bool = False
) -> list[Chain]:
    """Return the chains of which no cheaper one loses as little, the most expensive first.

    With `to_full`, only chains that end in the full model.

    The first ones are a ladder down to the front: chains that end in the full model, with
    thresholds so high that hardly a sample stops early.
    Shapes: table [v n], the loss of each variant on each sample.
    """
    found: list[ChainCandidate] = []
    for steps in _orders(answers, most_steps):
        if to_full and steps[-1] != answers.full:
            continue
        for measure in MEASURES if len(steps) > 1 else MEASURES[:1]:
            found += _Grid(answers, table, steps, measure).front()
    best = _undominated(found)
    safe = [one for one in found if one.chain.steps[-1] == answers.full]
    base = min(safe, key=lambda one: (one.loss, one.seconds))
    grid = _Grid(answers, table, base.chain.steps, base.chain.measure)
    ladder = grid.above(base.chain.thresholds)
    ladder.sort(key=lambda one: -one.seconds)
    best.sort(key=lambda one: (one.loss, -one.seconds))
    return [one.chain for one in (*ladder, *best)]


def _orders(answers: Answers, most_steps: int) -> Iterator[tuple[int, ...]]:
    """The chains: variants of rising cost, none that costs more than the full model."""
    usable = range(answers.full + 1)
    for length in range(1, min(most_steps, len(usable)) + 1):
        yield from combinations(usable, length)


class _Grid:
    """All thresholds of one chain together, by histograms instead of one by one."""

    def __init__(
        self, answers: Answers, table: np.ndarray, steps: tuple[int, ...], measure: str
    ) -> None:
        self.answers, self.table, self.steps, self.measure = answers, table, steps, measure
        confidence = answers.confidence[MEASURES.index(measure)]
        self.levels = [_levels(confidence[step]) for step in steps[:-1]]
        # A sample stops at level k of a step if its place there is above k.
        self.places = [
            np.searchsorted(levels, confidence[step], side="right")
            for levels, step in zip(self.levels, steps, strict=False)
        ]

    def front(self) -> list[ChainCandidate]:
        """The undominated ones of this chain."""
        loss, seconds = self._sums()
        flat = np.flatnonzero(is_undominated(seconds.ravel(), loss.ravel()))
        return [
            self._candidate(np.unravel_index(at, loss.shape), loss.ravel()[at], seconds.ravel()[at])
            for at in flat
        ]

    def above(self, thresholds: Sequence[float]) -> list[ChainCandidate]:
        """The chains with thresholds raised level by level, up to one that never stops early."""
        start = [
            int(np.flatnonzero(levels == threshold)[0])
            for levels, threshold in zip(self.levels, thresholds, strict=True)
        ]
        loss, seconds = self._sums()
        last = [len(levels) - 1 for levels in self.levels]
        places = [
            tuple(min(at + up, most) for at, most in zip(start, last, strict=True))
            for up in range(_LEVELS + 1)
        ]
        unique = dict.fromkeys(places)
        return [self._candidate(place, loss[place], seconds[place]) for place in unique]

    def _candidate(self, place: Sequence[int], loss: float, seconds: float) -> ChainCandidate:
        thresholds = tuple(float(levels[at]) for levels, at in zip(self.levels, place, strict=True))
        return ChainCandidate(
            Chain(self.steps, self.measure, thresholds), float(seconds), float(loss)
        )

    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean loss and mean seconds for all thresholds.

        Shapes: -> two [levels of each step but the last].
        """
        shape = tuple(map(len, self.levels))
        loss, seconds = np.zeros(shape), np.zeros(shape)
        for at, step in enumerate(self.steps):
            ended = self._past(at, self.table[step])
            if at < len(shape):
                ended = ended[..., None] - self._past(at + 1, self.table[step])
            loss += _spread(ended, len(shape))
            asked = self._past(at, np.ones(self.answers.n))
            seconds += _spread(asked * self.answers.variants[step].seconds, len(shape))
        return loss / self.answers.n, seconds / self.answers.n

    def _past(self, steps: int, values: np.ndarray) -> np.ndarray:
        """Sums of the values of the samples that none of the first `steps` stops.

        Shapes: values [n] -> [levels of each of these steps].
        """
        sizes = tuple(len(levels) + 1 for levels in self.levels[:steps])
        if not sizes:
            return np.asarray(values.sum())
        flat = np.ravel_multi_index(self.places[:steps], sizes)
        sums = np.bincount(flat, weights=values, minlength=math.prod(sizes)).reshape(sizes)
        for axis, size in enumerate(sizes):
            sums = np.take(np.cumsum(sums, axis=axis), range(size - 1), axis=axis)
        return sums


def _spread(array: np.ndarray, axes: int) -> np.ndarray:
    """Return the array with an axis of length 1 for each later step."""
    return array.reshape(array.shape + (1,) * (axes - array.ndim))


def _levels(confidence: np.ndarray) -> np.ndarray:
    """Thresholds worth trying, rising; at the last one nothing stops.

    A sample with a confidence below 0 never stops.
    """
    never = [2.0]  # above 1, which no confidence reaches
    if not len(usable := confidence[confidence >= 0]):
        return np.array(never)
    quantiles = np.quantile(usable, np.linspace(0, 1, _LEVELS), method="higher")
    return np.unique(np.append(quantiles, never))


def is_undominated(seconds: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """True where nothing that costs as little loses less.

    Shapes: [n], [n] -> [n] bool.
    """
    order = np.lexsort((loss, seconds))
    best = np.minimum.accumulate(np.concatenate([[np.inf], loss[order][:-1]]))
    kept = np.zeros(len(loss), bool)
    kept[order] = loss[order] < best - _LEAST_GAIN
    return kept


def _undominated(found: Sequence[ChainCandidate]) -> list[ChainCandidate]:
    seconds = np.array([one.seconds for one in found])
    loss = np.array([one.loss for one in found])
    return [found[at] for at in np.flatnonzero(is_undominated(seconds, loss))]


_ROUNDING = 1e-9
# Chains that are tested one after the other often lose and gain as many samples.
_p_value = lru_cache(4096)(paired_p_value)
_bound = lru_cache(4096)(paired_bound)
_binomial = lru_cache(4096)(binomial_p_value)


class Counts(NamedTuple):
    """How many samples of a group were lost and won; the name is empty if it is all samples."""

    name: str
    lost: int
    won: int
    n: int


@dataclass(frozen=True)
class ClassRisk:
    """The risk of a chain among the samples of one class.

    Units: as in `Certificate`.
    """

    name: str
    samples: Count  # that certify
    observed: Annotated[float, Range(-1, 1)]
    bound: Annotated[float, Range(-1, 1)]

    @staticmethod
    def of(group: Counts, bound: float) -> "ClassRisk":
        """Return it with the digits that are written."""
        name, lost, won, n = group
        return ClassRisk(name, n, round((lost - won) / n, 6), round(bound, 6))


@dataclass(frozen=True)
class Certificate:
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
    classes: tuple[ClassRisk, ...] = ()


@dataclass(frozen=True)
class MissingCertificate:
    """No chain that is cheaper than the full model passed; what was reached, and what would do.

    `samples` is the number of calibration samples at which the best chain would pass if its risk
    is what was observed, without those of other data that chose; None if no number would do.
    """

    risk: float
    bound: float
    samples: int | None
    worst: str = ""  # the class of which these are bound and samples, if each one is certified


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
) -> list[Certificate | MissingCertificate]:
    """Find for each risk the cheapest chain that passes, each at this confidence of its own.

    The learning samples order the candidates from the most expensive to the cheapest; the testing
    samples go through them in that order and stop at the first that fails. A risk of 0 is that of
    the full model itself, which needs no test.

    Raises: SaccadeError if labels are needed and missing.
    """
    table = answers.differs if against == "full" else answers.lost
    test = RiskTest(confidence, against)
    chains = front(answers.learning, table[:, : answers.learn], steps)
    return [chosen(answers, tested(chains, answers, table), risk, test) for risk in risks]


@dataclass(frozen=True)
class TestedChain:
    """A candidate with its losses on the testing samples."""

    chain: Chain
    losses: np.ndarray
    seconds: float


def tested(chains: Sequence[Chain], answers: Answers, table: np.ndarray) -> list[TestedChain]:
    """Return chains with their losses on the testing samples; the table is of all samples."""
    testing, like_traffic = answers.testing, answers.like_traffic
    table = table[:, answers.learn :]
    return [
        TestedChain(chain, chain.losses(testing, table), chain.seconds(like_traffic))
        for chain in chains
    ]


@dataclass(frozen=True)
class RiskTest:
    """The test that fits the losses: 0 and 1 against the full model; -1, 0, 1 against labels."""

    confidence: float
    against: Against

    def groups(self, losses: np.ndarray) -> list[Counts]:
        """Return the groups of samples in which the risk must be kept: all samples, first."""
        return [Counts("", int((losses > 0).sum()), int((losses < 0).sum()), len(losses))]

    def passes(self, losses: np.ndarray, risk: float) -> bool:
        """Return whether "the risk is above `risk`" is rejected for each group."""
        return all(self._rejects(group, risk) for group in self.groups(losses))

    def _rejects(self, group: Counts, risk: float) -> bool:
        level, (_, lost, won, n) = 1 - self.confidence, group
        if self.against == "full":
            return _binomial(lost, n, risk) <= level
        return _p_value(lost, won, n, risk, level) <= level

    def bound(self, group: Counts) -> float:
        """Return the upper confidence bound on the mean loss."""
        _, lost, won, n = group
        if self.against == "full":
            return binomial_bound(lost, n, self.confidence)
        return _bound(lost, won, n, self.confidence)

    def near(self, group: Counts) -> float:
        """Return about what the bound is, which is enough to compare."""
        _, lost, won, n = group
        mean = (lost - won) / n
        error = math.sqrt(((lost + won) / n - mean**2) / n)
        return mean + NormalDist().inv_cdf(self.confidence) * error

    def worst(self, losses: np.ndarray) -> Counts:
        """Return the group that is furthest from passing."""
        return max(self.groups(losses), key=self.near)

    def samples_needed(self, lost: float, won: float, risk: float) -> int | None:
        """Return how many testing samples would do if these shares are lost and won."""
        if self.against == "full":
            return samples_needed(lost, risk, self.confidence)
        return paired_samples_needed(lost, won, risk, self.confidence)


def chosen(
    answers: Answers, tried: Sequence[TestedChain], risk: float, test: RiskTest
) -> Certificate | MissingCertificate:
    # A mean of equal times may be less than each of them, by rounding.
    full_seconds = answers.variants[answers.full].seconds * (1 - _ROUNDING)
    passed = list(takewhile(lambda one: test.passes(one.losses, risk), tried))
    cheaper = [one for one in passed if one.seconds < full_seconds]
    if cheaper:
        best = min(cheaper, key=lambda one: one.seconds)
        # Bounds are found to a precision; that this risk is rejected is known.
        every, *bounds = [min(risk, test.bound(one)) for one in test.groups(best.losses)]
        certified = _certified(answers, best.chain, risk, best.losses, every)
        rows = zip(test.groups(best.losses)[1:], bounds, strict=True)
        return replace(certified, classes=tuple(ClassRisk.of(*row) for row in rows))
    if risk == 0:
        full = Chain((answers.full,), MEASURES[0], ())
        return _certified(answers, full, risk, np.zeros(1), 0.0)
    nearest = min(
        (one for one in tried if one.seconds < full_seconds),
        key=lambda one: test.near(test.worst(one.losses)),
        default=tried[-1],
    )
    if test.passes(nearest.losses, risk) and len(passed) < len(tried):
        nearest = tried[len(passed)]  # the one that ended the sequence
    worst = test.worst(nearest.losses)
    needed = test.samples_needed(worst.lost / worst.n, worst.won / worst.n, risk)
    least = least_samples(risk, test.confidence, test.against, apart=answers.apart)
    if needed is not None and least is not None:
        needed = max(needed if answers.apart else _in_all(needed), least)
    return MissingCertificate(risk, test.bound(worst), needed, worst.name)


def _certified(
    answers: Answers, chain: Chain, risk: float, losses: np.ndarray, bound: float
) -> Certificate:
    return Certificate(
        risk=risk,
        chain=chain,
        bound=bound,
        observed=float(losses.mean()),
        seconds=chain.seconds(answers.like_traffic),
        shares=chain.shares(answers.like_traffic),
    )


def _in_all(tested: int) -> int:
    """Return how many calibration samples are needed for this many to certify."""
    least = math.floor(tested / (1 - LEARN_SHARE)) - 1  # the share is of a rounded number
    return next(n for n in count(least) if n - round(LEARN_SHARE * n) >= tested)
