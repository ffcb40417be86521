# SPDX-License-Identifier: Apache-2.0
"""What a lane measures of itself: seconds per unit of work, and of a group."""

import math
import time

KEEP = 0.9  # weight of the old mean at each measurement: about the last ten count

# The weight that old measurements keep when a group is measured.
KEPT_WEIGHT = 0.8
# Seconds of rest after which old measurements have a tenth of their weight.
REST_FADE_S = 1.0
# From this many measurements on, they are averaged; before, a faster one replaces all others.
AVERAGED_FROM = 5
# A group counts at most this many times its expected time: its process may have been suspended.
OUTLIER_RATIO = 3.0
# Seconds of rest after which the shortest time is the last one.
SHORTEST_FORGOTTEN_S = 60.0
# Seconds of rest after which a lane that seemed too slow is tried again; each failure doubles them.
RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
# A lane that is tried again is no longer slow below this part of its old time.
RECOVERED_RATIO = 0.7
# The fixed part of a group that is guessed from the first measurement, in groups of its size.
GUESSED_FIXED_GROUPS = 4.0
# The weight and the seconds after which sums for the fixed part fade: slower than the time itself.
FIXED_PART_KEPT_WEIGHT, FIXED_PART_FADE_S = 0.95, 1.0
# Variance of the group sizes over their squared mean from which the fixed part can be learned.
LEAST_SIZE_VARIANCE = 0.05
# Steps towards the learned fixed part, and back to the guess if nothing can be learned.
LEARNED_RATE, GUESSED_RATE = 0.2, 0.02


class Mean:
    """Mean seconds per unit, in which old measurements fade."""

    def __init__(self) -> None:
        self._seconds, self._amount = 0.0, 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record that an amount took some seconds."""
        if amount > 0:
            self._seconds = KEEP * self._seconds + seconds
            self._amount = KEEP * self._amount + amount

    def of(self, amount: float) -> float:
        """Return the expected time for an amount; 0 until something was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class Pace:
    """The two means of a lane: for running and for decoding."""

    def __init__(self) -> None:
        self.run, self.decode = Mean(), Mean()

    def seconds(self, work: float, megapixels: float) -> float:
        """Return the expected time for a request of this cost."""
        return self.run.of(work) + self.decode.of(megapixels)


class ServiceTime:
    """Seconds of a lane's group by its rows: a fixed part, and a part per row.

    The proportion of the two parts is learned slowly from groups of different sizes, and the time
    of a unit quickly. The time of a lane that rests drifts to the shortest one, because what was
    measured last was measured under a load that may have gone.
    """

    def __init__(self) -> None:
        # Fixed part, in rows: a group of n rows takes `fixed + n` units. Until groups of different
        # sizes were seen it is a guess. One that is too good is soon corrected, because the lane
        # then gets large groups; one that is too bad would never be tried.
        self._fixed = 0.0
        self._count, self._slow_s = 0, RETRY_S
        self._seconds = self._units = 0.0
        self._least = math.inf  # shortest mean time of a unit
        self._sums = [0.0] * 5  # weight, rows, seconds, rows^2, rows * seconds
        self._at_s = -math.inf  # the last measurement

    @property
    def rested_s(self) -> float:
        """Seconds since the last measurement."""
        return time.monotonic() - self._at_s

    @property
    def unsure(self) -> bool:
        """Whether what was measured is too little, or too old, to give the lane up as slow."""
        return self._count < AVERAGED_FROM or self.rested_s > self._slow_s

    def add(self, rows: float, seconds: float) -> None:
        """Record that a group of some rows took some seconds."""
        if rows <= 0 or seconds <= 0:
            return
        rested_s = self.rested_s
        if self._count == 0:
            self._fixed = GUESSED_FIXED_GROUPS * rows
        else:
            if rested_s < REST_FADE_S:  # a process that was suspended for a moment
                seconds = min(seconds, OUTLIER_RATIO * self.seconds(rows))
            self._learn_fixed(rows, seconds)
        again = self._count and rested_s > self._slow_s
        still_slow = again and seconds > RECOVERED_RATIO * self.seconds(rows)
        self._slow_s = min(LONGEST_RETRY_S, 2 * self._slow_s) if still_slow else RETRY_S
        keep = KEPT_WEIGHT * 0.1 ** min(9.0, rested_s / REST_FADE_S)
        if self._count < AVERAGED_FROM and seconds < self.seconds(rows):
            keep, self._least = 0.0, math.inf  # the first calls of a model may be slow
        self._count += 1
        self._seconds = keep * self._seconds + seconds
        self._units = keep * self._units + self._fixed + rows
        unit = self._seconds / self._units
        rise = (
            (unit - self._least) * min(1.0, rested_s / SHORTEST_FORGOTTEN_S)
            if unit > self._least
            else 0.0
        )
        self._least = min(unit, self._least + rise)
        self._at_s = time.monotonic()

    def seconds(self, rows: float) -> float:
        """Return the expected time of a group; 0 until something was measured."""
        if not self._units:
            return 0.0
        unit = self._seconds / self._units
        drift = math.exp(min(0.0, REST_FADE_S - self.rested_s) / REST_FADE_S)
        return (self._fixed + rows) * (self._least + drift * (unit - self._least))

    def _learn_fixed(self, rows: float, seconds: float) -> None:
        # In units, so that the level may change meanwhile.
        units = seconds * self._units / self._seconds
        terms = (1.0, rows, units, rows * rows, rows * units)
        keep = FIXED_PART_KEPT_WEIGHT * math.exp(-self.rested_s / FIXED_PART_FADE_S)
        self._sums = [keep * old + new for old, new in zip(self._sums, terms, strict=True)]
        weight, *sums = self._sums
        mean, height, squares, products = (value / weight for value in sums)
        variance, most = squares - mean * mean, 10.0 * mean  # as if the size hardly mattered
        fixed, weight = GUESSED_FIXED_GROUPS * mean, GUESSED_RATE
        if variance >= LEAST_SIZE_VARIANCE * mean * mean:
            slope = (products - mean * height) / variance
            fixed = min(most, max(0.0, height / slope - mean)) if slope > 0 else most
            weight = LEARNED_RATE
        fixed = self._fixed + weight * (fixed - self._fixed)
        scale = (fixed + mean) / (self._fixed + mean)
        self._fixed, self._units, self._least = fixed, scale * self._units, self._least / scale
