# SPDX-License-Identifier: Apache-2.0
"""Chains of variants with a threshold for each step, and the cheap ones among very many."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from saccade.exporter.policy.answers import MEASURES, Answers

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

    def ends(self, answers: Answers) -> np.ndarray:
        """Return the step at which each sample ends.

        Shapes: -> int64 [n], from 0.
        """
        confidence = answers.confidence[MEASURES.index(self.measure)]
        ends = np.full(answers.n, len(self.steps) - 1)
        for at in reversed(range(len(self.thresholds))):
            ends[confidence[self.steps[at]] >= self.thresholds[at]] = at
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


def front(answers: Answers, table: np.ndarray, most_steps: int) -> list[Chain]:
    """Return the chains of which no cheaper one loses as little, the most expensive first.

    The first ones are a ladder down to the front: chains that end in the full model, with
    thresholds so high that hardly a sample stops early.
    Shapes: table [v n], the loss of each variant on each sample.
    """
    found: list[ChainCandidate] = []
    for steps in _orders(answers, most_steps):
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
    for count in range(1, min(most_steps, len(usable)) + 1):
        yield from combinations(usable, count)


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
        flat = np.flatnonzero(_is_undominated(seconds.ravel(), loss.ravel()))
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
    """Thresholds worth trying, rising; at the last one nothing stops."""
    quantiles = np.quantile(confidence, np.linspace(0, 1, _LEVELS), method="higher")
    # Above 1, which no confidence reaches.
    return np.unique(np.append(quantiles, 2.0))


def _is_undominated(seconds: np.ndarray, loss: np.ndarray) -> np.ndarray:
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
    return [found[at] for at in np.flatnonzero(_is_undominated(seconds, loss))]
