# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice: when the machine is free, the best candidate that is still in time.

Requests that adapt wait here and not in a lane. When one of their groups has ended, the next one is
taken, and goes to the best candidate with which all that wait would be answered in time. So a burst
costs quality as soon as it arrives and no longer than it lasts, and nothing waits for an expensive
variant that was chosen before the burst.

Source: SlackFit, Khare et al. 2023 (arXiv 2312.16733), section 4.2: the choice for a batch when a
worker is free, from the earliest deadline. Here, the deadlines of all that wait count.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from backlog import Backlog
from calls import fail, refuse
from choose import candidates_of
from forecast import Forecast, Reach
from lane import OWN_MEGAPIXELS, later
from outcomes import QUEUE_FULL, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backlog import Ticket
    from choose import Candidate, Wish
    from lane import Lane
    from routes import Routes

# Share of the objective, and of the caller's remaining time, that a forecast may need.
SURE = 0.9
DOUBT = 10.0  # a forecast of more than this many times the limit is not tried
LATE = 0.8  # share of the objective in the server's queue after which a request is refused unread
REFUSE_S = 0.1  # part of the objective for which a refusal is not reconsidered
MOST_OBJECTIVES = 64


class Adapted(NamedTuple):
    """What a request's answer says about the choice."""

    choice: str
    degraded: bool  # whether a better candidate answers without load
    certified: bool


class Full(NamedTuple):
    """A refusal that is repeated for a moment, also for requests of more rows.

    Units: needs_s is the time that the cheapest candidate needs, over_s what is too much of it.
    """

    rows: float = math.inf
    needs_s: float = 0.0
    over_s: float = 0.0
    hopeless: bool = False  # too large for the cheapest candidate


class Objective:
    """Requests of the same candidates and the same objective."""

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        self.candidates = candidates
        self.full_until_s, self.full = -math.inf, Full()


class Due(NamedTuple):
    """A request that waits here: its objective, its wish, and when its answer has to be there."""

    objective: Objective
    wish: Wish
    due_s: float


class Busy(Exception):
    """Raised if no candidate can meet the objective; the message goes to the caller."""


class Adaptive:
    """The requests of one router that adapt to the load, until one of the lanes has them."""

    def __init__(
        self,
        routes: Routes,
        lanes: dict[tuple[str, str], Lane],
        release: Callable[[Candidate, Wish, Ticket], None],
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`release` offers a request to the lane of a candidate.

        `lag_s` returns how long requests wait before the router receives them.
        """
        shares = routes.adaptive.shares if routes.adaptive else {}
        reach = {
            policy.name: Reach(len(policy.steps), shares.get(policy.name, ()))
            for policy in routes.policies
        }
        self.forecast = Forecast(routes, lanes, reach)
        self._routes, self._lanes, self._lag_s = routes, lanes, lag_s
        self._release = release
        self._objectives: dict[Any, Objective] = {}
        self._slots = max((lane.in_flight for lane in lanes.values()), default=1)
        self._most: float = self._slots  # groups that may be in lanes
        self._rows = max((route.run_batch for route in routes.variants), default=1)
        self._backlog = Backlog(self._slots)
        self._lock = threading.RLock()  # a lane's own lock is taken inside it

    def forget(self) -> None:
        """Forget the candidates: they have changed."""
        with self._lock:
            self._objectives.clear()

    def check_arrival(self, wish: Wish, role: str, left_s: float, rows: int) -> None:
        """Refuse a request before its inputs are read, which costs least.

        It is refused if its time was over when the router received it, or if a request like it was
        refused a moment ago.

        Raises: Busy with the time that it waited, or the one that it would need.
        """
        lag_s, wanted_s = self._lag_s(), min(wish.slo_s, left_s)
        if lag_s >= LATE * wanted_s:
            raise Busy(
                f"model '{self._routes.model}' is busy: this request waited about "
                f"{1e3 * lag_s:.3g} ms in the server's queue, which leaves too little of "
                f"{1e3 * wanted_s:.3g} ms; {later(lag_s)}"
            )
        with self._lock:
            objective = self._objective_of(wish, role)
            if time.monotonic() < objective.full_until_s and rows >= objective.full.rows:
                raise Busy(self._refusal(objective, wanted_s))

    def offer(self, wish: Wish, ticket: Ticket) -> None:
        """Let a request wait until the machine is free, or refuse it.

        Raises: Busy if no candidate can meet the objective.
        """
        now_s, lag_s = time.monotonic(), self._lag_s()
        limit_s = SURE * min(wish.slo_s - lag_s, ticket.left_s)
        with self._lock:
            objective = self._objective_of(wish, ticket.role)
            cheapest = objective.candidates[-1]
            alone_s = self.forecast.alone_s(cheapest, ticket)
            needs_s = self._wait_s(cheapest, ticket) + self.forecast.answer_s(cheapest, ticket)
            tries = alone_s < DOUBT * limit_s and self.forecast.seems_slow(cheapest, ticket.role)
            removed = None
            if needs_s <= limit_s or tries:
                removed = self._backlog.make_room(ticket)
            if removed is None:
                over_s, hopeless = needs_s - limit_s, alone_s > limit_s
                objective.full = Full(ticket.rows, needs_s, over_s, hopeless)
                objective.full_until_s = now_s + REFUSE_S * limit_s
                raise Busy(self._refusal(objective, min(wish.slo_s, ticket.left_s)))
            for other in removed:
                text = self._refusal(other.adapted.objective, other.adapted.wish.slo_s)
                refuse(other.sender, text, QUEUE_FULL)
            ticket = ticket._replace(adapted=Due(objective, wish, now_s + limit_s))
            if ticket.megapixels > OWN_MEGAPIXELS:  # it is decoded while it waits in a lane
                self._give([ticket])
            else:
                self._backlog.add(ticket)
                self.go_on()

    def go_on(self) -> None:
        """Give the next groups to lanes, as far as the machine is free."""
        with self._lock:
            while self._backlog.requests and len(self._left_s()) < self._most:
                group = self._backlog.take(self._rows, lambda *_: 0.0)
                if not group:
                    return
                alike: dict[tuple[int, str], list[Ticket]] = {}
                for ticket in group:
                    alike.setdefault((id(ticket.adapted.objective), ticket.role), []).append(ticket)
                for tickets in alike.values():
                    try:
                        self._give(tickets)
                    except Exception as error:  # the lane that has ended a group must continue
                        for ticket in tickets:
                            fail(ticket.sender, "no candidate could be chosen", error)

    def expire(self) -> None:
        """Refuse the requests whose time has run out, and continue if a lane has refused some."""
        with self._lock:
            expired = self._backlog.expired()
        for ticket in expired:
            ticket.sender.waited(ticket.waited_s)
            refuse(
                ticket.sender, "the request's timeout ran out before a variant was free", TIMEOUT
            )
        self.go_on()

    def close(self) -> None:
        """Give all that waits to the lanes, which answer it before they close."""
        with self._lock:
            self._most = math.inf
            self.go_on()

    def _give(self, tickets: list[Ticket]) -> None:
        objective, role = tickets[0].adapted.objective, tickets[0].role
        at = self._chosen(objective, tickets)
        candidate = objective.candidates[at]
        adapted = Adapted(candidate.name, at > 0, candidate.certified)
        with self._lanes[candidate.routes[0].name, role].together:  # as one group
            for ticket in tickets:
                wish = ticket.adapted.wish
                self._release(candidate, wish, ticket._replace(adapted=adapted))

    def _chosen(self, objective: Objective, tickets: list[Ticket]) -> int:
        """Return the best candidate with which these and all that wait are in time, or the last."""
        now_s, first = time.monotonic(), tickets[0]
        others = sorted(self._backlog.tickets, key=lambda ticket: ticket.adapted.due_s)
        groups = [*grouped([*tickets, *others], self._rows, now_s)]
        for at, candidate in enumerate(objective.candidates):
            if self._in_time(candidate, first, groups, now_s):
                better = objective.candidates[:at] if not others else ()
                tried = (i for i, one in enumerate(better) if self._seems_slow(one, first, now_s))
                return next(tried, at)
        return len(objective.candidates) - 1

    def _seems_slow(self, candidate: Candidate, ticket: Ticket, now_s: float) -> bool:
        """Return whether one image would take too long, which only a request can find out."""
        one = ticket._replace(rows=1, work=ticket.work / ticket.rows)
        alone_s, limit_s = self.forecast.alone_s(candidate, one), ticket.adapted.due_s - now_s
        within = limit_s < alone_s < DOUBT * limit_s
        return within and self.forecast.seems_slow(candidate, ticket.role)

    def _in_time(
        self, candidate: Candidate, first: Ticket, groups: list[Batch], now_s: float
    ) -> bool:
        took_s: dict[tuple[float, float], float] = {}  # most groups are full
        ended_s = now_s + self._lane_s(candidate, first)
        for work, megapixels, due_s in groups:
            if (work, megapixels) not in took_s:
                took_s[work, megapixels] = self._group_s(candidate, first, work, megapixels)
            took = took_s[work, megapixels]
            if ended_s + took > due_s:
                return False
            ended_s += took / self._slots
        return True

    def _wait_s(self, candidate: Candidate, ticket: Ticket) -> float:
        """Return the seconds until a request that arrives now is taken, if this one answers all."""
        left_s = self._left_s()
        work, _ = self._backlog.ahead_of(ticket)
        full, rest = divmod(work, self._rows)
        wait_s = full * self._group_s(candidate, ticket, self._rows, 0.0) if full else 0.0
        wait_s += self._group_s(candidate, ticket, rest, 0.0) if rest else 0.0
        return wait_s / self._slots + (min(left_s) if len(left_s) >= self._slots else 0.0)

    def _group_s(self, candidate: Candidate, like: Ticket, work: float, megapixels: float) -> float:
        """Return the seconds that a group of requests like this one takes alone."""
        group = like._replace(rows=max(1, round(work)), work=work, megapixels=megapixels)
        return self.forecast.alone_s(candidate, group)

    def _lane_s(self, candidate: Candidate, ticket: Ticket) -> float:
        return self.forecast.answer_s(candidate, ticket) - self.forecast.alone_s(candidate, ticket)

    def _left_s(self) -> list[float]:
        """Return the seconds that each group that adapts to the load still takes in a lane."""
        return [left_s for lane in self._lanes.values() for left_s in lane.adapting_s()]

    def _objective_of(self, wish: Wish, role: str) -> Objective:
        named = wish.followed.policy.name if wish.followed and wish.risk is None else wish.risk
        # Two digits: callers choose the objective, and they are few.
        key = role, named, wish.embeds, f"{wish.slo_s:.2g}"
        objective = self._objectives.pop(key, None) or Objective(candidates_of(self._routes, wish))
        self._objectives[key] = objective
        if len(self._objectives) > MOST_OBJECTIVES:
            oldest = next(iter(self._objectives))  # the one that was not used for longest
            del self._objectives[oldest]
        return objective

    def _refusal(self, objective: Objective, wanted_s: float) -> str:
        full = objective.full
        hint = later(full.over_s)
        if full.hopeless:
            hint = "send less in one request, or allow more time"
        return (
            f"model '{self._routes.model}' is busy: found no way to answer this request within "
            f"{1e3 * max(0.0, wanted_s):.3g} ms; the cheapest, "
            f"'{objective.candidates[-1].name}', needs about {1e3 * full.needs_s:.3g} ms; {hint}"
        )


class Batch(NamedTuple):
    """Requests that are answered together."""

    work: float
    megapixels: float
    due_s: float  # of the earliest; what is late already is not waited for


def grouped(tickets: Sequence[Ticket], rows: int, now_s: float) -> Iterator[Batch]:
    """Yield the groups in which requests are answered, in order."""
    group, held = Batch(0.0, 0.0, math.inf), 0
    for ticket in tickets:
        if held and held + ticket.rows > rows:
            yield group
            group, held = Batch(0.0, 0.0, math.inf), 0
        due_s = ticket.adapted.due_s
        held += ticket.rows
        group = Batch(
            group.work + ticket.work,
            group.megapixels + ticket.megapixels,
            min(group.due_s, due_s if due_s > now_s else math.inf),
        )
    yield group
