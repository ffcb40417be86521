# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice: the best way to answer a request that still meets its objective.

Requests of the same candidates and the same objective share a level: the candidate that answers
them now. A load that it cannot sustain lowers the level immediately. It rises when a better
candidate could have carried all recent requests for some time, and later if it had risen too early.

The router decides in one thread, so a decision must stay cheap most of all when there are too many
requests: it forecasts the level's own candidate, and compares candidates at most every LOOK_S.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from choose import candidates_of
from forecast import Forecast, Reach
from lane import later
from pace import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from backlog import Ticket
    from choose import Candidate, Wish
    from lane import Lane
    from routes import Routes

SAFE = 0.8  # share of the objective that a forecast may need
# Share of the caller's remaining time, as in a lane. Of the objective, for the best candidate, and
# for the cheapest: what it does not take is refused, so a larger reserve only refuses more.
SURE = 0.9
EASY = 0.5  # share of the time left for waiting that a better candidate may need to be taken again
FULL_LOAD, EASY_LOAD = 0.95, 0.85  # how busy the busiest lane may be to stay, and to go up
DOUBT = 10.0  # a forecast of more than this many times the limit is not tried
BEHIND, BEHIND_S = 0.3, 0.1  # lag as a part of the objective that lowers levels, and how often
REFUSE_S = 0.1  # part of the objective for which a refusal is not reconsidered
HOLD_S, MOST_HOLD_S = 0.75, 2.5  # how long a better candidate must have fit
STABLE_S = 6.0  # a level that rose and kept for this time had not risen too early
LOOK_S = 0.02  # between two comparisons of candidates
# A better lane is measured beside those that have the load, which slow it down: so after this time
# without a miss, the level also goes up to one that seems this busy.
QUIET_S, TRIAL_LOAD = 2.0, 1.5
LASTING_S = 2.0  # a load that lowers the level is too large in this window, and in the usual one
TRY_S, CALM_S = 0.1, 0.5  # between two requests that measure a better lane; after a miss, none
MOST_LEVELS = 64


class Adapted(NamedTuple):
    """What a request's answer says about the choice."""

    choice: str
    degraded: bool  # whether a better candidate answers without load
    certified: bool


class Full(NamedTuple):
    """A refusal that is repeated for a moment, also for requests of more rows.

    Units: needs_s is the time that the cheapest candidate needs, over_s what is too much of it.
    """

    rows: int
    needs_s: float = 0.0
    over_s: float = 0.0
    large: bool = False  # too large for the level, also if nothing else was waiting
    hopeless: bool = False  # too large for the cheapest candidate


class Level:
    """The candidate that answers requests of one kind, and what is known of the better ones."""

    def __init__(self, candidates: tuple[Candidate, ...]) -> None:
        self.candidates = candidates
        self.at = 0
        self.demand, self.lasting = Rate(), Rate(LASTING_S)  # rows per second; `lasting` at most
        self._fits_since: list[float | None] = [None] * len(candidates)
        self._looked_s = self._compared_s = self._asked_s = -math.inf
        self._fitted_s = self._rose_s = self.fell_s = self.missed_s = self.tried_s = -math.inf
        self._hold_s = HOLD_S
        self.spill = 0  # who answers what the level cannot; all between the two are full
        self.full_until_s, self.full = -math.inf, Full(0)

    @property
    def current(self) -> Candidate:
        """The candidate that answers now."""
        return self.candidates[self.at]

    def wants(self, rows: int) -> None:
        """Count the rows of a request as load."""
        self.demand.add(rows)
        self.lasting.add(rows)

    def asked(self, now_s: float) -> None:
        """Note a request. After a pause there is no load that the level could be for."""
        if now_s - self._asked_s > MOST_HOLD_S:
            self.at, self._hold_s = 0, HOLD_S
        self._asked_s = now_s

    def fall(self, to: int, now_s: float) -> None:
        """Go down to a cheaper candidate; the next rise takes longer if the last was too early."""
        early = now_s - self._rose_s < STABLE_S
        self._hold_s = min(MOST_HOLD_S, 2 * self._hold_s) if early else HOLD_S
        self.at, self.fell_s = to, now_s
        self._fits_since = [None] * len(self.candidates)

    def looks(self, now_s: float) -> bool:
        """Return whether it is time to look at the better candidates."""
        if self.at == 0 or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def compares(self, now_s: float) -> bool:
        """Return whether it is time to look at the cheaper candidates."""
        if now_s - self._compared_s < LOOK_S:
            return False
        self._compared_s, self.spill = now_s, self.at + 1
        return True

    def rise(self, fits: list[bool], now_s: float) -> None:
        """Go up to the best candidate that has fit for long enough; `fits` are the better ones."""
        for at, fit in enumerate(fits):
            since_s = self._fits_since[at]
            self._fits_since[at] = (now_s if since_s is None else since_s) if fit else None
        if now_s - max(self._fitted_s, self.fell_s) > MOST_HOLD_S:
            self._hold_s = HOLD_S  # the last rise did not come too early
        if any(fits):
            self._fitted_s = now_s
        for at in range(len(fits)):
            since_s = self._fits_since[at]
            if since_s is not None and now_s - since_s >= self._hold_s:
                self.at, self._rose_s = at, now_s
                self.lasting = Rate(LASTING_S)  # the load before the rise has gone
                return


class Busy(Exception):
    """Raised if no candidate can meet the objective; the message goes to the caller."""


class Adaptive:
    """The levels of one router's requests."""

    def __init__(
        self,
        routes: Routes,
        lanes: dict[tuple[str, str], Lane],
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`lag_s` returns how long requests wait before the router receives them."""
        shares = routes.adaptive.shares if routes.adaptive else {}
        reach = {
            policy.name: Reach(len(policy.steps), shares.get(policy.name, ()))
            for policy in routes.policies
        }
        self.forecast = Forecast(routes, lanes, reach)
        self._routes, self._lag_s = routes, lag_s
        self._levels: dict[Any, Level] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Forget the levels: the candidates have changed."""
        with self._lock:
            self._levels.clear()

    def check_arrival(self, wish: Wish, role: str, left_s: float, rows: int) -> None:
        """Refuse a request before its inputs are read, which costs least.

        It is refused if its time was over when the router received it, or if a request like it was
        refused a moment ago.

        Raises: Busy with the time that it waited, or the one that it would need.
        """
        now_s, lag_s = time.monotonic(), self._lag_s()
        wanted_s = min(wish.slo_s, left_s)
        late = lag_s >= SAFE * wanted_s
        with self._lock:
            level = self._level_of(wish, role)
            full = now_s < level.full_until_s and rows >= level.full.rows
            if not (late or full):
                return
            level.asked(now_s)
            if late:
                self._fall_behind(level, now_s)
            else:
                level.wants(0 if level.full.large else rows)
        if not late:
            raise Busy(self._refusal(level, wanted_s))
        raise Busy(
            f"model '{self._routes.model}' is busy: this request waited about {1e3 * lag_s:.3g} ms "
            f"in the server's queue, which leaves too little of {1e3 * wanted_s:.3g} ms; "
            f"{later(lag_s)}"
        )

    def choose(self, wish: Wish, ticket: Ticket) -> tuple[Candidate, Adapted]:
        """Return who answers a request.

        Raises: Busy if no candidate can meet the objective.
        """
        now_s = time.monotonic()
        lag_s = self._lag_s()
        behind = lag_s > BEHIND * wish.slo_s
        with self._lock:
            level = self._level_of(wish, ticket.role)
            level.asked(now_s)
            share = SURE if level.at in {0, len(level.candidates) - 1} else SAFE
            limit_s = min(share * wish.slo_s - lag_s, SURE * ticket.left_s)
            at = self._chosen(level, ticket, limit_s, now_s, behind=behind)
        if at is None:
            raise Busy(self._refusal(level, min(wish.slo_s, ticket.left_s)))
        candidate = level.candidates[at]
        return candidate, Adapted(candidate.name, at > 0, candidate.certified)

    def _level_of(self, wish: Wish, role: str) -> Level:
        named = wish.followed.policy.name if wish.followed and wish.risk is None else wish.risk
        # Two digits: callers choose the objective, and the levels are few.
        key = role, named, wish.embeds, f"{wish.slo_s:.2g}"
        level = self._levels.pop(key, None) or Level(candidates_of(self._routes, wish))
        self._levels[key] = level
        if len(self._levels) > MOST_LEVELS:
            del self._levels[next(iter(self._levels))]  # the one that was not used for longest
        return level

    def _chosen(
        self, level: Level, ticket: Ticket, limit_s: float, now_s: float, *, behind: bool
    ) -> int | None:
        """Return who answers; `behind`: the machine cannot keep up, whatever the lanes say."""
        if behind:
            self._fall_behind(level, now_s)
        else:
            self._rise(level, ticket, limit_s, now_s)
        needs_s = self.forecast.answer_s(level.current, ticket)
        if needs_s <= limit_s:
            level.wants(ticket.rows)
            calm = not behind and needs_s <= EASY * limit_s
            return self._probed(level, ticket, limit_s, now_s) if calm else level.at
        # A burst, or a large request, is not a load that lasts: the others keep their level.
        large = self.forecast.alone_s(level.current, ticket) > limit_s
        level.wants(0 if large else ticket.rows)
        level.missed_s = now_s
        if level.compares(now_s):
            rows_per_s = min(level.demand.per_second, level.lasting.per_second)
            lasting = self._load(level, level.at, ticket, rows_per_s) > FULL_LOAD
            if lasting and (to := self._lower(level, ticket, limit_s)) is not None:
                level.fall(to, now_s)
                return to
        return self._spilled(level, ticket, limit_s, now_s, large=large)

    def _seems_slow_for_all(self, candidate: Candidate, ticket: Ticket, limit_s: float) -> bool:
        """Return whether one image would be too large for a candidate, which should be tried."""
        one = ticket._replace(rows=1, work=ticket.work / ticket.rows)
        alone_s = self.forecast.alone_s(candidate, one)
        return alone_s > limit_s and self.forecast.seems_slow(candidate, ticket.role)

    def _spilled(
        self, level: Level, ticket: Ticket, limit_s: float, now_s: float, *, large: bool
    ) -> int | None:
        """Return the best cheaper candidate that is in time; never a better one.

        The variants share the machine: work for an expensive one would slow down all. The level's
        own one is returned if only a request can tell whether it is still slow.
        """
        begin = level.at + 1 if large else max(level.spill, level.at + 1)
        every = range(begin, len(level.candidates))
        at = next((at for at in every if self._in_time(level, at, ticket, limit_s)), None)
        if not large:
            level.spill = len(level.candidates) if at is None else at
        if at is None:
            cheapest = level.candidates[-1]
            alone_s = self.forecast.alone_s(cheapest, ticket)
            if alone_s < DOUBT * limit_s and self.forecast.seems_slow(cheapest, ticket.role):
                return every.stop - 1
            needs_s, hopeless = self.forecast.answer_s(cheapest, ticket), alone_s > limit_s
            level.full = Full(ticket.rows, needs_s, needs_s - limit_s, large, hopeless)
            level.full_until_s = now_s + REFUSE_S * limit_s
        elif large and self._seems_slow_for_all(level.current, ticket, limit_s):
            return level.at
        return at

    def _fall_behind(self, level: Level, now_s: float) -> None:
        level.rise([False] * level.at, now_s)
        level.missed_s = now_s
        below = level.at + 1 < len(level.candidates)
        if below and now_s - level.fell_s > BEHIND_S:
            level.fall(level.at + 1, now_s)

    def _lower(self, level: Level, ticket: Ticket, limit_s: float) -> int | None:
        """Return the best candidate below that could answer all requests, or the least busy."""
        loads: dict[int, float] = {}
        for at in range(level.at + 1, len(level.candidates)):
            if self._in_time(level, at, ticket, limit_s):
                loads[at] = self._load(level, at, ticket)
                if loads[at] <= FULL_LOAD:
                    return at
        return min(loads, key=lambda at: loads[at], default=None)

    def _rise(self, level: Level, ticket: Ticket, limit_s: float, now_s: float) -> None:
        if level.looks(now_s):
            most = TRIAL_LOAD if now_s - level.missed_s > QUIET_S else EASY_LOAD
            fits = [self._fits(level, at, ticket, limit_s, most) for at in range(level.at)]
            level.rise(fits, now_s)

    def _fits(self, level: Level, at: int, ticket: Ticket, limit_s: float, most: float) -> bool:
        candidate = level.candidates[at]
        alone_s = self.forecast.alone_s(candidate, ticket)
        waiting_s = self.forecast.answer_s(candidate, ticket) - alone_s
        in_time = waiting_s <= EASY * (limit_s - alone_s)
        return in_time and self._load(level, at, ticket) <= most

    def _probed(self, level: Level, ticket: Ticket, limit_s: float, now_s: float) -> int:
        """Return the level, or a better candidate that rests: one request measures it again."""
        if now_s - level.tried_s < TRY_S or now_s - level.missed_s < CALM_S:
            return level.at
        for at in range(level.at):
            candidate = level.candidates[at]
            if self.forecast.rests(candidate, ticket.role) and (
                self.forecast.unsure(candidate, ticket.role)
                or self._in_time(level, at, ticket, limit_s)
            ):
                level.tried_s = now_s
                return at
        return level.at

    def _in_time(self, level: Level, at: int, ticket: Ticket, limit_s: float) -> bool:
        return self.forecast.answer_s(level.candidates[at], ticket) <= limit_s

    def _load(
        self, level: Level, at: int, ticket: Ticket, rows_per_s: float | None = None
    ) -> float:
        rows_per_s = level.demand.per_second if rows_per_s is None else rows_per_s
        shares = [(level.candidates[at], rows_per_s)]
        for (role, *_), other in self._levels.items():
            if other is not level and role == ticket.role:
                shares.append((other.current, other.demand.per_second))
        return self.forecast.busy(shares, ticket.role, ticket.rows)

    def _refusal(self, level: Level, wanted_s: float) -> str:
        full = level.full
        hint = later(full.over_s)
        if full.hopeless:
            hint = "send less in one request, or allow more time"
        return (
            f"model '{self._routes.model}' is busy: found no way to answer this request within "
            f"{1e3 * max(0.0, wanted_s):.3g} ms; the cheapest, "
            f"'{level.candidates[-1].name}', needs about {1e3 * full.needs_s:.3g} ms; {hint}"
        )
