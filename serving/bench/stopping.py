# SPDX-License-Identifier: Apache-2.0
"""When a measurement knows enough: rules on the widths of intervals, and the time that is left.

Every rule is about the width of an interval and not about where it lies, so looking at it several
times does not make a difference by chance more likely.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from saccade.models.scores.results import paired_log_ratio, samples_for

SCORE_HALF_WIDTH = 0.01  # of each score's 95 % interval; relative for scores above 1
DIFFERENCE_HALF_WIDTH = 0.005  # of the paired difference of neighbors in score, if it is small
SPEED_HALF_WIDTH = 0.05  # of the logarithm of the ratio of speeds of neighbors in speed
LEAST_ROUNDS = 3  # before rounds may stop because intervals are narrow
ROUNDS_IN_ANY_CASE = 2  # intervals of speeds need two
FIRST_LOOK_S = 10.0  # seconds of scoring before the first look at an interval
_LEAST_SAMPLES = 256
_GROWTH = 4  # from one look to the next


@dataclass(frozen=True)
class Deadline:
    """The end of a measurement: `seconds` after it began."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    began: float = field(default=math.nan)

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            object.__setattr__(self, "began", self.clock())

    @property
    def left(self) -> float:
        """Seconds that are left; 0 after the end."""
        return max(0.0, self.began + self.seconds - self.clock())

    def part(self, share: float) -> "Deadline":
        """Return a deadline after a share of the time that is left."""
        return Deadline(share * self.left, self.clock)


def samples_needed(values: Mapping[str, np.ndarray]) -> int:
    """Return how many samples make the scores' intervals narrow, estimated from these.

    They are narrow if every score is known to one point, and every difference between two neighbors
    in score to half a point or to a quarter of itself (95 %, normal approximation).

    Shapes: values[variant] [n], one per sample in the same order; their mean is the score.
    """
    order = sorted(values.values(), key=lambda own: float(own.mean()))
    scale = max(1.0, *(abs(float(own.mean())) for own in order))
    needs = [_needed(own, SCORE_HALF_WIDTH * scale) for own in order]
    for lower, upper in itertools.pairwise(order):
        gain = upper - lower
        needs.append(_needed(gain, max(DIFFERENCE_HALF_WIDTH * scale, gain.mean() / 4)))
    return max(needs)


def _needed(values: np.ndarray, half_width: float) -> int:
    # One more sample that differs by one: equal values so far do not mean that all are equal.
    variance = (float(np.sum((values - values.mean()) ** 2)) + 1) / len(values)
    return samples_for(variance, half_width)


def next_look(scored: int, needed: int, affordable: int) -> int | None:
    """Return how many samples to score in all until the next look; None if it is enough.

    A look that would add less than a quarter is left out. Samples are scored again at each look,
    so `affordable` is the number that the remaining time allows from the start.
    """
    wanted = min(needed, _GROWTH * scored, affordable)
    return None if needed <= scored or wanted < 1.25 * scored else wanted


def first_look(samples_per_second: float, seconds: float) -> int:
    """Return how many samples to score before the first look."""
    return max(_LEAST_SAMPLES, round(samples_per_second * min(FIRST_LOOK_S, seconds)))


def rounds_suffice(
    rates: Mapping[str, Sequence[float]], left_s: float, round_s: float = 0.0
) -> bool:
    """Return whether the rounds so far suffice, or another one does not fit into `left_s`.

    They suffice if the ratio of each two neighbors in speed is known to 5 %; for a single variant,
    its speed.

    Shapes: rates[variant] [rounds], inferences per second.
    """
    rounds = min(len(own) for own in rates.values())
    if rounds >= ROUNDS_IN_ANY_CASE and left_s <= round_s:
        return True
    return rounds >= LEAST_ROUNDS and all(
        _half_width(one, other) <= SPEED_HALF_WIDTH for one, other in _neighbours(rates)
    )


def _neighbours(
    rates: Mapping[str, Sequence[float]],
) -> list[tuple[Sequence[float], Sequence[float]]]:
    order = sorted(rates.values(), key=lambda own: float(np.mean(own)))
    if len(order) == 1:
        return [(order[0], [1.0] * len(order[0]))]
    return list(itertools.pairwise(order))


def _half_width(one: Sequence[float], other: Sequence[float]) -> float:
    low, high = paired_log_ratio(one, other)
    return (high - low) / 2


def duration_text(seconds: float) -> str:
    """Return a duration for a person."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
