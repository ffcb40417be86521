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
from saccade.exporter.runtimes.runners import Runner
from saccade.models.checkpoint import Checkpoint
from saccade.models.interface import Arrays, Component
from saccade.models.scores.intervals import wilson

_FIRST = 4  # samples of the first run, which tells how long one takes
_LOOK = 16  # samples between two looks at the interval, the fewest
_BATCH, _BATCH_S = 64, 2.0  # of a fast model, if they fit into the time that is left
_ENOUGH = 256  # samples after which only an undecided score asks for more
_ERROR = 0.05  # chance that any of the intervals misses the change of the score


@dataclass(frozen=True)
class Scored:
    """The calibration data of a component, and the float32 model to compare with."""

    checkpoint: Checkpoint
    component: Component
    float32: Callable[[], Runner]

    def has_answers(self, outputs: Arrays) -> bool:
        """True if there are right answers, and outputs to compare with them."""
        if self.component.score is not None:
            return True
        return "logits" in outputs and "labels" in self.checkpoint.calibration


@dataclass(frozen=True)
class Further:
    """Further samples, and the answers of the file and of the float32 model to them.

    Shapes: each array [n ...]. `score` is None if there are no right answers.
    """

    inputs: Arrays
    labelled: Arrays
    answers: Arrays
    expected: Arrays
    score: ScoreChange | None


def compare_further(
    run: Runner, scored: Scored, limit: float, seconds: float, clock: Callable[[], float]
) -> Further:
    """Compare a narrower file and the float32 model, in batches of up to 64 if it is fast.

    It stops after `seconds`, at the end of the data, or after 256 samples: earlier if the score's
    interval is beyond `limit`, and later if only its change is, which is never reported from few
    samples. All looks at the interval together miss the change with a chance of 5 %.

    Units: limit in percentage points, clock in seconds.
    """
    rows = np.random.default_rng(2).permutation(calibration_count(scored.checkpoint))
    float32, end = scored.float32(), clock() + seconds
    tally = _Tally(scored.component, 1 + math.ceil(len(rows) / _LOOK))
    parts: list[tuple[Arrays, Arrays, Arrays, Arrays]] = []
    start, size, score = 0, _FIRST, None
    while start < len(rows):
        chosen, began = rows[start : start + size], clock()
        labelled, inputs = calibration_samples(scored.checkpoint, scored.component, chosen)
        mine, theirs = run(inputs), float32(inputs)
        parts.append((inputs, labelled, mine, theirs))
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
        lasts = (now - began) / len(chosen) * _BATCH
        size = _BATCH if lasts <= min(_BATCH_S, end - now) else _LOOK
    inputs, labelled, mine, theirs = (_joined(own) for own in zip(*parts, strict=True))
    return Further(inputs, labelled, mine, theirs, score)


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
