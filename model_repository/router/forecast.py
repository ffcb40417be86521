# SPDX-License-Identifier: Apache-2.0
"""Forecast when the router would answer a request, and how busy each lane would be.

Standard library only.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lane import Lane
    from routes import Policy, Route, Routes
    from ticket import Ticket

KEEP = 0.8  # weight of the old measurements at each new one
LONG = 0.95  # the same for the proportion of the fixed part
LONG_S = 1.0  # and the time in which they fade
FADE_S = 1.0  # in this time of rest, the old measurements lose nine tenths of their weight
FORGET_S = 60.0  # time in which the shortest time is forgotten
PROBE_S = 0.5  # a lane that was not measured for this time has rested
SLOW_S, MOST_SLOW_S = 2.0, 60.0  # rest after which a lane that seemed too slow is tried again
RATE_S = 0.5  # window in which arrivals and busy time count
FIXED = 4.0  # guessed fixed part, in groups
FORTH, BACK = 0.2, 0.02  # weight of what was learned of it, and of the guess if nothing can be
TRUST = 5  # from this many measurements on, they are averaged
FASTER = 0.7  # a lane that is tried again is no longer slow below this part of its old time
OUTLIER = 3.0  # a group counts at most this many times its expected time
SPREAD = 0.05  # relative variance of the group sizes from which the fixed part is learned
RARE = 0.05  # a later step that fewer requests than this reach does not count
PRIOR_ROWS = 50.0  # weight of the calibration's shares, in rows of traffic
MOST_ROWS = 2000.0  # rows of traffic that count for the shares
GUESS = 0.5  # share of rows that go on to the next step, if nothing is known


class Rate:
    """An amount per second in a window that slides: what was before it no longer counts.

    The window is approximated by two buckets, so that time and memory do not grow with the load.
    """

    def __init__(self, window_s: float = RATE_S) -> None:
        self._window_s = window_s
        self._before, self._amount, self._begun_s = 0.0, 0.0, -math.inf

    def add(self, amount: float) -> None:
        """Count an amount."""
        before, so_far, begun_s = self._buckets(time.monotonic())
        self._before, self._amount, self._begun_s = before, so_far + amount, begun_s

    @property
    def per_second(self) -> float:
        """Mean amount per second."""
        now_s = time.monotonic()
        before, amount, begun_s = self._buckets(now_s)
        in_window = 1.0 - (now_s - begun_s) / self._window_s  # of the bucket before
        return (in_window * before + amount) / self._window_s

    def _buckets(self, now_s: float) -> tuple[float, float, float]:
        """Return the amounts in the bucket before and in this one, and when this one began."""
        passed_s = now_s - self._begun_s
        if passed_s < self._window_s:
            return self._before, self._amount, self._begun_s
        if passed_s < 2 * self._window_s:
            return self._amount, 0.0, self._begun_s + self._window_s
        return 0.0, 0.0, now_s


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
        self._count, self._slow_s = 0, SLOW_S
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
        return self._count < TRUST or self.rested_s > self._slow_s

    def add(self, rows: float, seconds: float) -> None:
        """Record that a group of some rows took some seconds."""
        if rows <= 0 or seconds <= 0:
            return
        rested_s = self.rested_s
        if self._count == 0:
            self._fixed = FIXED * rows
        else:
            if rested_s < FADE_S:  # a process that was suspended for a moment
                seconds = min(seconds, OUTLIER * self.seconds(rows))
            self._learn_fixed(rows, seconds)
        again = self._count and rested_s > self._slow_s
        still_slow = again and seconds > FASTER * self.seconds(rows)
        self._slow_s = min(MOST_SLOW_S, 2 * self._slow_s) if still_slow else SLOW_S
        keep = KEEP * 0.1 ** min(9.0, rested_s / FADE_S)
        if self._count < TRUST and seconds < self.seconds(rows):
            keep, self._least = 0.0, math.inf  # the first calls of a model may be slow
        self._count += 1
        self._seconds = keep * self._seconds + seconds
        self._units = keep * self._units + self._fixed + rows
        unit = self._seconds / self._units
        rise = (unit - self._least) * min(1.0, rested_s / FORGET_S) if unit > self._least else 0.0
        self._least = min(unit, self._least + rise)
        self._at_s = time.monotonic()

    def seconds(self, rows: float) -> float:
        """Return the expected time of a group; 0 until something was measured."""
        if not self._units:
            return 0.0
        unit = self._seconds / self._units
        drift = math.exp(min(0.0, FADE_S - self.rested_s) / FADE_S)
        return (self._fixed + rows) * (self._least + drift * (unit - self._least))

    def _learn_fixed(self, rows: float, seconds: float) -> None:
        # In units, so that the level may change meanwhile.
        units = seconds * self._units / self._seconds
        terms = (1.0, rows, units, rows * rows, rows * units)
        keep = LONG * math.exp(-self.rested_s / LONG_S)
        self._sums = [keep * old + new for old, new in zip(self._sums, terms, strict=True)]
        weight, *sums = self._sums
        mean, height, squares, products = (value / weight for value in sums)
        variance, most = squares - mean * mean, 10.0 * mean  # as if the size hardly mattered
        fixed, weight = FIXED * mean, BACK
        if variance >= SPREAD * mean * mean:
            slope = (products - mean * height) / variance
            fixed = min(most, max(0.0, height / slope - mean)) if slope > 0 else most
            weight = FORTH
        fixed = self._fixed + weight * (fixed - self._fixed)
        scale = (fixed + mean) / (self._fixed + mean)
        self._fixed, self._units, self._least = fixed, scale * self._units, self._least / scale


class Reach:
    """Share of a policy's rows that reach each of its steps, from its traffic."""

    def __init__(self, steps: int, ended: Sequence[float] = ()) -> None:
        """`ended` are the shares of the calibration's samples that end at each step."""
        at_first = [GUESS**at for at in range(steps)]
        if len(ended) == steps:
            at_first = [max(0.0, 1.0 - sum(ended[:at])) for at in range(steps)]
        self._reached = [PRIOR_ROWS * share for share in at_first]
        self.shares = at_first  # of the rows that reach each step; 1 for the first

    def add(self, ended: Sequence[int]) -> None:
        """Record how many rows of a request ended at each step."""
        keep = 1.0 - sum(ended) / MOST_ROWS
        for at in range(len(self._reached)):
            self._reached[at] = max(0.0, keep) * self._reached[at] + sum(ended[at:])
        self.shares = [reached / self._reached[0] for reached in self._reached]


class Candidate(NamedTuple):
    """One way to answer a request: by one variant, or along the chain of a policy."""

    name: str
    routes: tuple[Route, ...]
    policy: Policy | None = None
    certified: bool = True  # whether the answer is the full model's, or covered by a certificate


class Forecast:
    """What the lanes of one router are about to do.

    `lanes` are by variant and role. An unmeasured lane is judged by the measured ones and by the
    relative speed of its variant; until one lane has been measured, everything takes no time.
    """

    def __init__(
        self, routes: Routes, lanes: Mapping[tuple[str, str], Lane], reach: dict[str, Reach]
    ) -> None:
        self._quickness = {route.name: route.quickness for route in routes.variants}
        self._lanes, self._reach = lanes, reach

    def learn(self, policy: str, ended: Sequence[int]) -> None:
        """Record at which steps of a policy the rows of a request ended."""
        if policy in self._reach:
            self._reach[policy].add(ended)

    def answer_s(self, candidate: Candidate, ticket: Ticket) -> float:
        """Return the seconds after which a request would be answered."""
        return self._sum(candidate, ticket, self._waiting_s)

    def alone_s(self, candidate: Candidate, ticket: Ticket) -> float:
        """Return the seconds that a request would take if nothing else was waiting."""
        return self._sum(candidate, ticket, lambda *_: 0.0)

    def busy(
        self, shares_of_load: Sequence[tuple[Candidate, float]], role: str, rows: int
    ) -> float:
        """Return how busy the busiest lane of the first candidate would be; 1 is always busy.

        `shares_of_load` are the candidates that answer requests which adapt to the load, and their
        rows per second; `rows` are those of one request.
        """
        first, *others = [self._demand(each, role, rate, rows) for each, rate in shares_of_load]
        return max(
            demand
            + sum(other.get(name, 0.0) for other in others)
            + self._lanes[name, role].other_busy.per_second
            for name, demand in first.items()
        )

    def rests(self, candidate: Candidate, role: str) -> bool:
        """Return whether the candidate's first lane is idle, and was not measured lately."""
        lane = self._lane(candidate.routes[0], role)
        return lane.idle and lane.service.rested_s > PROBE_S

    def seems_slow(self, candidate: Candidate, role: str) -> bool:
        """Return whether a forecast that the candidate is too slow should be tried now.

        A candidate that gets no requests would otherwise seem too slow forever. Its lanes are idle,
        so only one request at a time finds out.
        """
        idle = all(self._lane(route, role).idle for route in candidate.routes)
        return idle and self.unsure(candidate, role)

    def unsure(self, candidate: Candidate, role: str) -> bool:
        """Return whether a forecast that the candidate is too slow should be tried."""
        return any(self._lane(route, role).service.unsure for route in candidate.routes)

    def _demand(
        self, candidate: Candidate, role: str, rows_per_s: float, rows: int
    ) -> dict[str, float]:
        """Return the time per second that each variant's lane would need."""
        steps = zip(candidate.routes, self._shares(candidate), strict=True)
        needed = {}
        # Images are the same for all lanes. One that was last measured at its start seems too slow.
        mine = [lane for (_, part), lane in self._lanes.items() if part == role]
        measured = [lane.decoding.of(1.0) for lane in mine]
        decoding_s = min((seconds for seconds in measured if seconds), default=0.0)
        for route, share in steps:
            group = _group(route, share * rows)
            row_s = self._seconds(route, role, group) / group + decoding_s
            needed[route.name] = rows_per_s * share * row_s
        return needed

    def _sum(
        self, candidate: Candidate, ticket: Ticket, wait: Callable[[Route, Ticket], float]
    ) -> float:
        total = 0.0
        for at, (route, share) in enumerate(
            zip(candidate.routes, self._shares(candidate), strict=True)
        ):
            if 1.0 - (1.0 - min(1.0, share)) ** ticket.rows < RARE:
                break
            lane = self._lane(route, ticket.role)
            own = self._seconds(route, ticket.role, max(1.0, share * ticket.work))
            decode = 0.0 if at else lane.pace.decode.of(ticket.megapixels)
            total += wait(route, ticket) + own + decode
        return total

    def _waiting_s(self, route: Route, ticket: Ticket) -> float:
        """Return the seconds until the lane of a variant starts on a request that arrives now."""
        lane = self._lane(route, ticket.role)
        waiting = lane.ahead_of(ticket)
        group = _group(route, ticket.work)
        groups, rest = divmod(waiting.work, group)
        return (
            waiting.left_s
            + groups * self._seconds(route, ticket.role, group)
            + (self._seconds(route, ticket.role, rest) if rest else 0.0)
            + lane.pace.decode.of(waiting.megapixels)
        )

    def _seconds(self, route: Route, role: str, rows: float) -> float:
        """Return the time of a group; of an unmeasured lane, from those that were measured."""
        if own := self._lane(route, role).service.seconds(rows):
            return own
        scales = sorted(
            seconds * quickness
            for name, quickness in self._quickness.items()
            if (seconds := self._lanes[name, role].service.seconds(rows))
        )
        return scales[len(scales) // 2] / route.quickness if scales else 0.0

    def _shares(self, candidate: Candidate) -> list[float]:
        if candidate.policy is None or candidate.policy.name not in self._reach:
            return [1.0] * len(candidate.routes)
        return self._reach[candidate.policy.name].shares

    def _lane(self, route: Route, role: str) -> Lane:
        return self._lanes[route.name, role]


def _group(route: Route, work: float) -> float:
    """Return the work of a lane's full group if requests are of this work; it has at least one."""
    return max(float(route.run_batch), work)
