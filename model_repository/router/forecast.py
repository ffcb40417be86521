# SPDX-License-Identifier: Apache-2.0
"""Forecast when the router would answer a request, and how busy each lane would be.

Standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lane import Lane
    from routes import PolicyRoute, Route, Routes
    from ticket import Ticket

# Seconds after its last measurement from which a lane has rested.
RESTED_S = 0.5
# A later step that is reached with less than this probability does not count.
RARE_SHARE = 0.05
# Weight of the calibration's shares of rows that reach a step, in rows of traffic.
CALIBRATION_ROWS = 50.0
# Rows of traffic that count for these shares.
TRAFFIC_ROWS = 2000.0
# Share of rows that go on to the next step, if nothing is known.
GUESSED_SHARE = 0.5


class Reach:
    """Share of a policy's rows that reach each of its steps, from its traffic."""

    def __init__(self, steps: int, ended: Sequence[float] = ()) -> None:
        """`ended` are the shares of the calibration's samples that end at each step."""
        at_first = [GUESSED_SHARE**at for at in range(steps)]
        if len(ended) == steps:
            at_first = [max(0.0, 1.0 - sum(ended[:at])) for at in range(steps)]
        self._reached = [CALIBRATION_ROWS * share for share in at_first]
        self.shares = at_first  # of the rows that reach each step; 1 for the first

    def add(self, ended: Sequence[int]) -> None:
        """Record how many rows of a request ended at each step."""
        keep = 1.0 - sum(ended) / TRAFFIC_ROWS
        for at in range(len(self._reached)):
            self._reached[at] = max(0.0, keep) * self._reached[at] + sum(ended[at:])
        self.shares = [reached / self._reached[0] for reached in self._reached]


class Candidate(NamedTuple):
    """One way to answer a request: by one variant, or along the chain of a policy."""

    name: str
    routes: tuple[Route, ...]
    policy: PolicyRoute | None = None
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
        return lane.idle and lane.service.rested_s > RESTED_S

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
            if 1.0 - (1.0 - min(1.0, share)) ** ticket.rows < RARE_SHARE:
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
