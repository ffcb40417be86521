# SPDX-License-Identifier: Apache-2.0
"""One model's lane through the router: its door, what waits, and the thread that serves it.

Every component of every variant has its own, so that a request for a cheap one never waits for a
dear one.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from backlog import Backlog
from calls import fail, refuse
from outcomes import BUSY, QUEUE_FULL, TIMEOUT, UNAVAILABLE
from pace import Pace
from ticket import Ticket

PATIENCE_S = 60.0  # work for longer than this is not queued, whatever a caller says
SURE = 0.9  # of its time a request may need by the estimate, which is one
# A step is one image decoded or one call of the model: all that a lane cannot look up from.
STEP_WORK, STEP_MEGAPIXELS = 64.0, 50.0  # the largest that is legal
STEP_FACTOR, LEAST_STEP_S, MOST_STEP_S = 10.0, 60.0, 600.0


class Lane:
    """Refuses at the door what cannot be answered in its time, and hands groups to `answer`.

    `answer` gives the work that was run, by which the lane measures its pace.
    """

    def __init__(
        self, name: str, answer: Callable[["Lane", list[Ticket]], float], *, group_rows: int
    ) -> None:
        self.name = name
        self.pace = Pace()
        self._answer = answer
        self._group_rows = group_rows
        self._backlog = Backlog()
        self._running: tuple[float, float] | None = None  # since when, and the estimate, seconds
        self._step_s = self._decoding_s = 0.0  # since when the present step; decoding of a group
        self._groups = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def offer(self, ticket: Ticket) -> str:
        """Queue a request, or refuse it. Returns the text of the refusal."""
        with self._changed:
            text, reason = self._refusal(ticket)
            removed = [] if text else self._backlog.make_room(ticket)
            if removed is None:
                text, reason = self._full(), QUEUE_FULL
            elif not text:
                self._backlog.add(ticket)
                self._changed.notify()
            full = self._full() if removed else ""
        for other in removed or ():
            other.sender.waited(other.waited_s)
            refuse(other.sender, full, QUEUE_FULL)
        if text:
            refuse(ticket.sender, text, reason)
        return text

    def expire(self) -> None:
        """Answer the callers whose time has run out while they waited."""
        with self._changed:
            expired = self._backlog.expired()
        for ticket in expired:
            text = f"the request's timeout ran out before variant '{self.name}' was free"
            ticket.sender.waited(ticket.waited_s)
            refuse(ticket.sender, text, TIMEOUT)

    def step(self) -> None:
        """Say that the group goes on: an image was decoded, a call came back."""
        self._step_s = time.monotonic()

    def decoded(self, megapixels: float, seconds: float) -> None:
        """Say how long decoding took, which is not the model's time."""
        self._decoding_s += seconds
        self.pace.decode.add(megapixels, seconds)

    def report(self) -> dict[str, Any]:
        """Report to a probe: progress, the time of the present step, and what waits.

        Units: _s is seconds; `longest_step_s` is what no legal step takes.
        """
        with self._changed:
            now, running = time.monotonic(), self._running
            largest = self.pace.run.of(STEP_WORK), self.pace.decode.of(STEP_MEGAPIXELS)
            return {
                "groups": self._groups,
                "running_s": now - running[0] if running else 0.0,
                "step_s": now - self._step_s if running else 0.0,
                "longest_step_s": min(MOST_STEP_S, max(LEAST_STEP_S, STEP_FACTOR * max(largest))),
                "waiting": self._backlog.requests,
                "waiting_s": self._left_s(now) + self.pace.seconds(*self._backlog.cost),
            }

    def close(self) -> None:
        """Answer what is queued, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _refusal(self, ticket: Ticket) -> tuple[str, str]:
        """Why a request is not even queued; an idle lane takes all, so that it can measure."""
        if self._closed:  # to a request that comes from another lane while the router ends
            return f"variant '{self.name}' is being unloaded; try again in a second", UNAVAILABLE
        if self._running is None and not self._backlog.requests:
            return "", ""
        wait_s = self._left_s(time.monotonic()) + self.pace.seconds(*self._backlog.ahead_of(ticket))
        own_s = self.pace.seconds(ticket.work, ticket.megapixels)
        time_s = min(PATIENCE_S, SURE * ticket.left_s)
        if wait_s + own_s <= time_s:
            return "", ""
        if ticket.left_s > PATIENCE_S:
            return self._full(), QUEUE_FULL
        hint = later(wait_s + own_s - time_s)
        text = (
            f"variant '{self.name}' is busy: it could answer this request in about "
            f"{wait_s + own_s:.2g} s, its timeout leaves {max(0.0, ticket.left_s):.2g} s; "
            + (hint if own_s < time_s else "send less in one request, or allow more time")
        )
        return text, BUSY

    def _full(self) -> str:
        requests, seconds = self._backlog.requests, self.pace.seconds(*self._backlog.cost)
        return (
            f"the queue of variant '{self.name}' is full: {requests} requests wait, about "
            f"{seconds:.2g} s; send fewer requests at once, or {later(seconds / 2)}"
        )

    def _left_s(self, now: float) -> float:
        """Seconds that the present group still takes, by the estimate."""
        return max(0.0, self._running[0] + self._running[1] - now) if self._running else 0.0

    def _serve(self) -> None:
        while group := self._next_group():
            try:
                work = self._answer(self, group)
            except Exception as error:  # the thread has to go on for all others
                work = 0.0
                for ticket in group:
                    fail(ticket.sender, f"the lane of variant '{self.name}' failed", error)
            self._note(work)

    def _note(self, work: float) -> None:
        with self._changed:
            assert self._running is not None
            seconds = time.monotonic() - self._running[0] - self._decoding_s
            self.pace.run.add(work, seconds)
            self._running = None
            self._groups += 1

    def _next_group(self) -> list[Ticket]:
        with self._changed:
            while not self._backlog.requests and not self._closed:
                self._changed.wait()
            group = self._backlog.take(self._group_rows, self.pace.seconds)
            if group:
                self._begin(group)
            return group

    def _begin(self, group: list[Ticket]) -> None:
        work = sum(ticket.work for ticket in group)
        megapixels = sum(ticket.megapixels for ticket in group)
        self._step_s, self._decoding_s = time.monotonic(), 0.0
        self._running = self._step_s, self.pace.seconds(work, megapixels)


def later(seconds: float) -> str:
    """The hint of every refusal that a later try mends."""
    return f"try again in about {max(0.05, seconds):.2g} s"
