# SPDX-License-Identifier: Apache-2.0
"""A lane of the router: it admits requests, keeps those that wait, and has threads to serve them.

Every component of every variant has its own lane, so a request for a cheap variant never waits for
an expensive one. A lane has as many groups in flight as its model has instances. The images of
waiting requests are decoded by threads that all lanes share. They stay in the backlog meanwhile, so
that more requests can still join a group.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from backlog import Backlog, Ticket
from calls import fail, refuse
from outcomes import BUSY, QUEUE_FULL, TIMEOUT, UNAVAILABLE, Refused
from pace import Pace, ServiceTime

# More work than this is never queued, whatever a caller's timeout. If samples take seconds, this
# many of them may wait instead.
PATIENCE_S, PATIENCE_WORK = 60.0, 32.0
SURE = 0.9  # share of its time that a request may need: the estimate may be wrong
# A lane that is free decodes the images of a request itself if they are at most this large: passing
# them to another thread would take longer.
OWN_MEGAPIXELS = 0.5
# It always decodes what is at most this large: one small image, which mostly takes Python's lock.
SMALL_MEGAPIXELS = 0.04
# A step is one decoded image or one call of the model, during which a lane cannot do anything else.
STEP_WORK, STEP_MEGAPIXELS = 64.0, 50.0  # the largest legal step
INPUTS_LOST = "the inputs could not be prepared"
STEP_FACTOR, LEAST_STEP_S, MOST_STEP_S = 10.0, 60.0, 600.0
SLOW_STEP_FACTOR = 3.0  # where this is more than the most

LEAST_WAIT_S = 0.0005


class Waiting(NamedTuple):
    """What a lane does before it starts on a request that arrives now."""

    left_s: float  # of the current groups, until one is finished
    work: float
    megapixels: float


class Flight:
    """A group between its start and its answer."""

    __slots__ = ("adapts", "began_s", "between", "decoding_s", "expected_s", "number", "step_s")

    def __init__(self, number: int, expected_s: float, *, adapts: bool, between: bool) -> None:
        """`number` groups of the lane began before; `adapts`: it has requests that adapt.

        `between`: it is answered between two parts of another group, which has the same number.
        """
        self.number, self.between = number, between
        self.began_s = self.step_s = time.monotonic()
        self.expected_s, self.adapts = expected_s, adapts
        self.decoding_s = 0.0

    def left_s(self, now: float) -> float:
        """Return the estimated seconds that the group still takes."""
        return max(0.0, self.began_s + self.expected_s - now)


class Lane:
    """Refuses requests that cannot be answered in time, and passes groups of others to `answer`.

    `answer` returns the work that was run, from which the lane measures its pace. It is called by
    `in_flight` threads at a time. Requests may have image files if there are `decoders`, threads
    that look for some at `wake`.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Lane, list[Ticket]], float],
        *,
        group_rows: int,
        in_flight: int = 1,
        decoders: int = 0,
        wake: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended` is called after each group."""
        self.name = name
        self.pace, self.service = Pace(), ServiceTime()
        self.in_flight = in_flight
        self.decoders = max(1, decoders)
        self._answer, self._wake, self._decodes = answer, wake, decoders > 0
        self._ended = ended
        self._group_rows = group_rows
        self._backlog = Backlog(in_flight)
        self._flights: dict[int, Flight] = {}  # by thread
        self._begun = 0  # groups so far
        self._upcoming: deque[Ticket] | None = None  # to decode next; None: to be looked up
        self._ahead: set[int] = set()  # ids of the requests that the pool decodes
        self._for_pool = False  # whether some may wait that the pool should decode
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, daemon=True) for _ in range(in_flight)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, ticket: Ticket) -> str:
        """Queue a request, or refuse it. Returns the message of the refusal, or an empty string."""
        decode = False
        with self._changed:
            text, reason = self._refusal(ticket)
            removed = [] if text else self._backlog.make_room(ticket)
            if removed is None:
                text, reason = self._full(), QUEUE_FULL
            elif not text:
                self._backlog.add(ticket)
                self._upcoming = self._upcoming or None
                if self._is_ready(ticket):
                    self._changed.notify()
                if self._is_for_pool(ticket):
                    self._for_pool = True
                    busy = len(self._flights) >= self.in_flight
                    next_one = busy and self._backlog.requests <= self._group_rows
                    decode = next_one or ticket.megapixels > OWN_MEGAPIXELS
            full = self._full() if removed else ""
        if decode:
            self._wake()
        for other in removed or ():
            other.sender.waited(other.waited_s)
            refuse(other.sender, full, QUEUE_FULL)
        if text:
            refuse(ticket.sender, text, reason)
        return text

    def expire(self) -> None:
        """Refuse the waiting requests whose time has run out."""
        with self._changed:
            expired = self._backlog.expired()
        for ticket in expired:
            text = f"the request's timeout ran out before variant '{self.name}' was free"
            ticket.sender.waited(ticket.waited_s)
            refuse(ticket.sender, text, TIMEOUT)

    def step(self) -> None:
        """Note progress of this thread's group: an image was decoded, or a call returned."""
        if flight := self._flights.get(threading.get_ident()):
            flight.step_s = time.monotonic()

    def answer_others(self, ticket: Ticket, left: float) -> None:
        """Answer a group of other callers between two parts of this thread's large request.

        Nothing is done if the `left` work of the request would then end too late.
        """
        with self._changed:
            spare_s = ticket.left_s - self.pace.run.of(left)
            outer = self._flights[threading.get_ident()]
            if outer.between or spare_s < self.pace.run.of(self._group_rows):
                return
            group = self._backlog.take(
                self._group_rows,
                self.pace.seconds,
                lambda other: (
                    other.caller != ticket.caller
                    and other.rows <= self._group_rows
                    and self._is_ready(other)
                ),
            )
            if not group:
                return
            self._begin(group, outer)
        began_s = time.monotonic()
        self._run(group)
        with self._changed:
            outer.began_s += time.monotonic() - began_s
            self._flights[threading.get_ident()] = outer
        self._ended()

    def decoded(self, megapixels: float, seconds: float) -> None:
        """Note how long decoding took, which is not counted as the model's time."""
        with self._changed:
            self.pace.decode.add(megapixels, seconds)
            if flight := self._flights.get(threading.get_ident()):
                flight.decoding_s += seconds

    def to_decode(self) -> Ticket | None:
        """Return the next request whose images the pool should decode."""
        with self._changed:
            if self._upcoming is None:
                rows = self._group_rows * (self.in_flight + 1)
                self._upcoming = deque(
                    ticket
                    for ticket in self._backlog.upcoming(rows, self.pace.seconds)
                    if self._is_for_pool(ticket) and id(ticket) not in self._ahead
                )
            return self._upcoming[0] if self._upcoming else None

    def claim(self, ticket: Ticket) -> bool:
        """Let the pool decode the images of a request; False if something else happened to it."""
        with self._changed:
            if not self._upcoming or self._upcoming[0] is not ticket:
                return False
            self._upcoming.popleft()
            self._ahead.add(id(ticket))
            return True

    def decoded_ahead(self, ticket: Ticket, seconds: float, error: Exception | None) -> None:
        """Note that the pool has decoded the images of a request, or could not."""
        with self._changed:
            self._ahead.discard(id(ticket))
            decoded = None if error else ticket._replace(megapixels=0.0)
            refused = self._backlog.replace(ticket, decoded) and error is not None
            self._upcoming = self._upcoming or None
            self._changed.notify()
        if not refused:
            return
        ticket.sender.waited(ticket.waited_s)
        if isinstance(error, Refused):
            refuse(ticket.sender, str(error), error.reason)
        else:
            assert error is not None
            fail(ticket.sender, INPUTS_LOST, error)

    def report(self) -> dict[str, Any]:
        """Return a report for a probe: progress, the time of the current step, and the queue.

        `begun` groups were taken so far; of these the first `groups` have ended.
        Units: _s is seconds; `longest_step_s` is longer than any legal step.
        """
        with self._changed:
            now, flights = time.monotonic(), self._flights.values()
            return {
                "begun": self._begun,
                "groups": min((flight.number for flight in flights), default=self._begun),
                "running_s": max((now - flight.began_s for flight in flights), default=0.0),
                "step_s": max((now - flight.step_s for flight in flights), default=0.0),
                "longest_step_s": self._longest_step_s(),
                "waiting": self._backlog.requests,
                "waiting_s": self._left_s(now) + self._seconds(*self._backlog.cost),
            }

    def _longest_step_s(self) -> float:
        run_s = self.pace.run.of(STEP_WORK)
        if not run_s:  # the first batch of a large model may take minutes
            return MOST_STEP_S
        largest_s = max(run_s, self.pace.decode.of(STEP_MEGAPIXELS))
        most_s = max(MOST_STEP_S, SLOW_STEP_FACTOR * largest_s)
        return min(most_s, max(LEAST_STEP_S, STEP_FACTOR * largest_s))

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._flights and not self._backlog.requests

    def rests(self, seconds: float) -> bool:
        """Return whether nothing runs or waits, and nothing has run for some seconds."""
        with self._changed:
            return self.idle and self.service.rested_s >= seconds

    @property
    def together(self) -> threading.Condition:
        """The lane's lock: what is offered inside it may become one group."""
        return self._changed

    def adapting_s(self) -> list[float]:
        """Return the seconds that each group still takes that adapts to the load.

        Also of the groups that wait, for which that is not known.
        """
        with self._changed:
            now, flights = time.monotonic(), self._flights.values()
            running = [flight.left_s(now) for flight in flights if flight.adapts]
            return running + [0.0] * math.ceil(self._backlog.adapting / self._group_rows)

    def ahead_of(self, ticket: Ticket) -> Waiting:
        """Return what is done before a request that arrives now."""
        with self._changed:
            left_s = self._left_s(time.monotonic())
            return Waiting(left_s, *self._backlog.ahead_of(ticket))

    def close(self) -> None:
        """Answer the queued requests, then stop the threads. The pool must still run."""
        with self._changed:
            self._closed, self._backlog.others_s = True, -math.inf
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _refusal(self, ticket: Ticket) -> tuple[str, str]:
        """Return why a request is not queued.

        An idle lane accepts all until its pace is known, and sometimes later to measure it again.
        """
        if self._closed:  # for a request that comes from another lane while the router shuts down
            return f"variant '{self.name}' is being unloaded; try again in a second", UNAVAILABLE
        idle = self.idle
        if idle and self.service.unsure:
            return "", ""
        wait_s = self._left_s(time.monotonic()) + self._seconds(*self._backlog.ahead_of(ticket))
        own_s = self.pace.seconds(ticket.work, ticket.megapixels)
        if idle:  # what was measured under load has gone with it
            decode_s = self.pace.decode.of(ticket.megapixels)
            own_s = min(own_s, self.service.seconds(ticket.work) + decode_s)
        patience_s = max(PATIENCE_S, self.pace.run.of(PATIENCE_WORK))
        time_s = min(patience_s, SURE * ticket.left_s)
        if wait_s + own_s <= time_s:
            return "", ""
        if ticket.left_s > patience_s:
            return self._full(), QUEUE_FULL
        hint = later(wait_s + own_s - time_s)
        busy = "" if idle else "is busy: it "
        text = (
            f"variant '{self.name}' {busy}could answer this request in about "
            f"{wait_s + own_s:.2g} s, but its timeout leaves {max(0.0, ticket.left_s):.2g} s; "
            + (hint if own_s < time_s else "send less in one request, or allow more time")
        )
        return text, BUSY

    def _full(self) -> str:
        requests, seconds = self._backlog.requests, self._seconds(*self._backlog.cost)
        return (
            f"the queue of variant '{self.name}' is full: {requests} requests are waiting (about "
            f"{seconds:.2g} s); send fewer requests at a time, or {later(seconds / 2)}"
        )

    def _seconds(self, work: float, megapixels: float) -> float:
        """Return the expected time for waiting requests, which all threads share."""
        return self.pace.seconds(work / self.in_flight, megapixels / self.decoders)

    def _left_s(self, now: float) -> float:
        """Return the estimated seconds until a thread is free."""
        if len(self._flights) < self.in_flight:
            return 0.0
        return min(flight.left_s(now) for flight in self._flights.values())

    def _serve(self) -> None:
        while group := self._next_group():
            self._run(group)
            self._ended()

    def _run(self, group: list[Ticket]) -> None:
        try:
            work = self._answer(self, group)
        except Exception as error:  # the thread must continue for the other requests
            work = 0.0
            for ticket in group:
                fail(ticket.sender, f"the lane of variant '{self.name}' failed", error)
        self._note(work)

    def _note(self, work: float) -> None:
        with self._changed:
            flight = self._flights.pop(threading.get_ident())
            seconds = time.monotonic() - flight.began_s - flight.decoding_s
            self.pace.run.add(work, seconds)
            self.service.add(work, seconds)

    def _next_group(self) -> list[Ticket]:
        with self._changed:
            while not (
                group := self._backlog.take(self._group_rows, self.pace.seconds, self._is_ready)
            ):
                waiting = self._backlog.requests
                if self._closed and not waiting:
                    return []
                files = self._look_ahead()
                pause_s = (
                    self._backlog.pause_s if files else max(LEAST_WAIT_S, self._backlog.pause_s)
                )
                self._changed.wait((pause_s or None) if waiting else None)
            self._begin(group)
            self._look_ahead()
            if self._closed:
                self._changed.notify_all()
            elif self._backlog.requests:
                self._changed.notify()  # what did not fit this group is for the next thread
            return group

    def _look_ahead(self) -> bool:
        """Let the pool decode the images of what waits; returns whether there are any."""
        self._upcoming = None
        self._for_pool = self._for_pool and bool(self._backlog.requests)
        if self._for_pool:
            self._wake()
        return self._for_pool

    def _is_for_pool(self, ticket: Ticket) -> bool:
        """Return whether the pool decodes the images of a request, if no thread is free."""
        return self._decodes and ticket.megapixels > SMALL_MEGAPIXELS

    def _is_ready(self, ticket: Ticket) -> bool:
        """Return whether a thread may take a request: its images are decoded, or small."""
        if not self._is_for_pool(ticket):
            return True
        return ticket.megapixels <= OWN_MEGAPIXELS and id(ticket) not in self._ahead

    def _begin(self, group: list[Ticket], outer: Flight | None = None) -> None:
        work = sum(ticket.work for ticket in group)
        megapixels = sum(ticket.megapixels for ticket in group)
        adapts = any(ticket.adapted is not None for ticket in group)
        self._flights[threading.get_ident()] = Flight(
            outer.number if outer else self._begun,
            self.pace.seconds(work, megapixels),
            adapts=adapts,
            between=outer is not None,
        )
        self._begun += 1


def later(seconds: float) -> str:
    """Return the hint for refusals after which a later try may succeed."""
    return f"try again in about {max(0.05, seconds):.2g} s"
