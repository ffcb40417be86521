# SPDX-License-Identifier: Apache-2.0
"""What a type narrower than float32 changes on further samples, within a stated time.

The file is compared with the folded model in float32, which is much cheaper than the float64
reference: the errors of float32 are far below the limits of a narrower type.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from saccade.exporter.artefact.manifest import ScoreChange
from saccade.exporter.graph.samples import calibration_count, calibration_samples
from saccade.exporter.runtimes.runners import Runner, run_in_batches
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component
from saccade.models.scores.results import wilson

_BATCHES = (64, 16, 4)  # the last also tells how long a sample takes
_BATCH_S = 2.0  # a larger batch of a slow model takes memory
_NOISE_SHARE = 0.25  # of the time, for random inputs
_ENOUGH = 256  # samples after which only an undecided score asks for more
_ERROR = 0.05  # chance that any of the intervals misses the change of the score


@dataclass(frozen=True)
class ScoreReference:
    """The calibration data of a component, and the float32 model to compare with."""

    checkpoint: Checkpoint
    component: Component
    float32: Callable[[], Runner]
    noise: Callable[[], Arrays] = dict  # random inputs that the reference has not answered

    @property
    def inputs(self) -> list[str]:
        """The names of the component's inputs."""
        return [spec.name for spec in self.component.inputs]

    def has_answers(self, outputs: Arrays) -> bool:
        """True if there are right answers, and outputs to compare with them."""
        if self.component.score is not None:
            return True
        return "logits" in outputs and "labels" in self.checkpoint.calibration


@dataclass(frozen=True)
class FurtherSamples:
    """Further samples, and the answers of the file and of the float32 model to them.

    Calibration samples are first, then random inputs, which the file answers a second time in
    another order. `score` is None if there are no right answers.

    Shapes: each array [n ...], but those of `labelled` [m ...] with m at most n.
    """

    inputs: Arrays
    labelled: Arrays
    answers: tuple[Arrays, Arrays]
    expected: Arrays
    score: ScoreChange | None


# Inputs, and the answers of the file and of the float32 model.
_Answered = tuple[Arrays, Arrays, Arrays]


def compare_further(
    run: Runner, scored: ScoreReference, limit: float, seconds: float, clock: Callable[[], float]
) -> FurtherSamples:
    """Compare a narrower file and the float32 model, in batches of up to 64 if it is fast.

    Random inputs get a quarter of the time. Calibration samples get the rest: it stops after
    `seconds`, at the end of the data, or after 256 samples: earlier if the score's interval is
    beyond `limit`, and later if only its change is, which is never reported from few samples. All
    looks at the interval together miss the change with a chance of 5 %.

    Units: limit in percentage points, clock in seconds.
    """
    float32, began = scored.float32(), clock()
    noise, largest = _answered_noise(run, float32, scored, began + _NOISE_SHARE * seconds, clock)
    real, kept, score = _answered_calibration(run, float32, scored, limit, began + seconds, clock)
    inputs, mine, theirs = (_joined(own) for own in zip(*real, *noise, strict=True))
    labelled, again = _joined(kept), mine
    if noise:
        first = len(next(iter(labelled.values())))
        drawn = {name: array[first:] for name, array in inputs.items()}
        order = np.random.default_rng(3).permutation(len(next(iter(drawn.values()))))
        second = run_in_batches(run, drawn, largest, order)
        again = {name: np.concatenate([mine[name][:first], second[name]]) for name in mine}
    return FurtherSamples(inputs, labelled, (mine, again), theirs, score)


def _answered_noise(
    run: Runner, float32: Runner, scored: ScoreReference, end: float, clock: Callable[[], float]
) -> tuple[list[_Answered], int]:
    """Return the answers to random inputs, as many as fit into the time, and the largest batch."""
    noise, parts = scored.noise(), list[_Answered]()
    count = len(next(iter(noise.values()), ()))
    start, size, largest, each_s = 0, _BATCHES[-1], 0, 0.0
    while start < count and (began := clock()) + size * each_s < end:
        inputs = {name: noise[name][start : start + size] for name in scored.inputs}
        parts.append((inputs, run(inputs), float32(inputs)))
        start, largest, now = start + size, max(largest, size), clock()
        each_s = (now - began) / size
        size = _next_size(each_s, end - now)
    return parts, largest


def _answered_calibration(
    run: Runner,
    float32: Runner,
    scored: ScoreReference,
    limit: float,
    end: float,
    clock: Callable[[], float],
) -> tuple[list[_Answered], list[Arrays], ScoreChange | None]:
    """Return the answers to calibration samples, their arrays, and the change of the score."""
    rows = np.random.default_rng(2).permutation(calibration_count(scored.checkpoint))
    tally = _Tally(scored.component, 1 + math.ceil(len(rows) / _BATCHES[-1]))
    parts, kept = list[_Answered](), list[Arrays]()
    start, size, score = 0, _BATCHES[-1], None
    while start < len(rows):
        chosen, began = rows[start : start + size], clock()
        labelled, real = calibration_samples(scored.checkpoint, scored.component, chosen)
        inputs = {name: real[name] for name in scored.inputs}
        mine, theirs = run(inputs), float32(inputs)
        parts.append((inputs, mine, theirs))
        kept.append(labelled)
        if scored.has_answers(theirs):
            tally.add(mine, theirs, labelled)
            score = tally.change()
        start, now = start + len(chosen), clock()
        within = score is None or abs(score.points) <= limit
        decided = score is None or score.decided(limit)
        if (decided and not within) or (within and now >= end):
            break
        if decided and start >= _ENOUGH:
            break
        size = _next_size((now - began) / len(chosen), end - now)
    return parts, kept, score


def _next_size(each_s: float, left_s: float) -> int:
    longest = min(_BATCH_S, left_s)
    return next((size for size in _BATCHES if size * each_s <= longest), _BATCHES[-1])


class _Tally:
    """The answers of both models so far."""

    def __init__(self, component: Component, looks: int) -> None:
        self._component = component
        self._z = NormalDist().inv_cdf(1 - _ERROR / (4 * looks))  # two rates, two sides
        self._won = self._lost = self._count = 0
        self._kept: tuple[list[Arrays], list[Arrays], list[Arrays]] = ([], [], [])

    def add(self, mine: Arrays, theirs: Arrays, labelled: Arrays) -> None:
        self._count += len(next(iter(labelled.values())))
        if self._component.score is not None:
            for kept, arrays in zip(self._kept, (mine, theirs, labelled), strict=True):
                kept.append(arrays)
            return
        right, was = (_right(answers, labelled) for answers in (mine, theirs))
        self._won += int(np.sum(right & ~was))
        self._lost += int(np.sum(was & ~right))

    def change(self) -> ScoreChange | None:
        """Return the change so far; a family's own score has no interval. None: no score."""
        count = self._count
        if (score := self._component.score) is not None:
            mine, theirs, labelled = (_joined(kept) for kept in self._kept)
            points = 100 * (score(mine, labelled) - score(theirs, labelled))
            return None if math.isnan(points) else ScoreChange(count, points)
        won, lost = (wilson(events, count, self._z) for events in (self._won, self._lost))
        return ScoreChange(
            count,
            100 * (self._won - self._lost) / count,
            100 * (won[0] - lost[1]),
            100 * (won[1] - lost[0]),
        )


def _right(answers: Arrays, labelled: Arrays) -> np.ndarray:
    chances = answers.get("probabilities", answers["logits"])
    right: np.ndarray = chances.argmax(axis=-1) == labelled["labels"]
    return right


def _joined(kept: Sequence[Arrays]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([arrays[name] for arrays in kept]) for name in kept[0]}
