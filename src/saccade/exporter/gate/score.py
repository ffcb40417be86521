# SPDX-License-Identifier: Apache-2.0
"""How much a type narrower than float32 changes the score: a paired test that stops early."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from saccade.exporter.artefact.manifest import ScoreChange
from saccade.exporter.graph.samples import calibration_count, calibration_samples
from saccade.exporter.runtimes.runners import Runner
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component
from saccade.models.scores.intervals import wilson

_LOOK = 16  # samples between two looks at the interval
_ERROR = 0.05  # chance that any of the intervals misses the change of the score


@dataclass(frozen=True)
class Scored:
    """The calibration data of a component, and the float32 model to compare scores with."""

    checkpoint: Checkpoint
    component: Component
    float32: Callable[[], Runner]

    def has_answers(self, outputs: Arrays) -> bool:
        """True if there are right answers, and outputs to compare with them."""
        if self.component.score is not None:
            return True
        return "logits" in outputs and "labels" in self.checkpoint.calibration


def score_change(
    run: Runner, scored: Scored, limit: float, seconds: float, clock: Callable[[], float]
) -> ScoreChange | None:
    """Compare the scores of a narrower file and of the float32 model, sample by sample.

    It ends when the interval of the change is on one side of `limit`, at the end of the data, or
    after `seconds` if the change so far is within the limit: a change beyond it is never reported
    from few samples. All looks together miss the change with a chance of 5 %. None: there are no
    right answers.

    Units: limit in percentage points, clock in seconds.
    """
    rows = np.random.default_rng(2).permutation(calibration_count(scored.checkpoint))
    float32, end = scored.float32(), clock() + seconds
    tally = _Tally(scored.component, math.ceil(len(rows) / _LOOK))
    for start in range(0, len(rows), _LOOK):
        labelled, inputs = calibration_samples(
            scored.checkpoint, scored.component, rows[start : start + _LOOK]
        )
        tally.add(run(inputs), float32(inputs), labelled)
        change = tally.change()
        if change is None:
            return None
        decided = change.decided(limit)
        if decided or (clock() >= end and abs(change.points) <= limit):
            break
    return change


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


def _joined(kept: list[Arrays]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([arrays[name] for arrays in kept]) for name in kept[0]}
