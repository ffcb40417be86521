# SPDX-License-Identifier: Apache-2.0
"""One model's lane through the router: a bounded queue and the thread that serves it.

Every part of every variant has its own, so that a request for a cheap one never waits for a
dear one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Ticket(NamedTuple):
    """A request that has been routed and waits for its answer."""

    role: str  # of the part it is for
    inputs: dict[str, Any]  # arrays by name; encoded images as an array of bytes
    rows: int
    parameters: dict[str, Any]  # the family's own, checked
    wanted: tuple[str, ...]
    sender: Any
    deadline_s: float | None  # on time.monotonic(), where the caller set a timeout
    arrived_s: float

    @property
    def is_late(self) -> bool:
        """Whether the caller's time has run out."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def waited_s(self) -> float:
        """How long the request has been in the router."""
        return time.monotonic() - self.arrived_s


class Lane:
    """Groups what waits, at most `group_rows` at a time, and hands each group to `answer`."""

    def __init__(
        self, answer: Callable[[list[Ticket]], None], *, group_rows: int, max_waiting: int
    ) -> None:
        self._answer = answer
        self._group_rows = group_rows
        self._max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def offer(self, ticket: Ticket) -> bool:
        """Queue a request; False if the lane is full."""
        with self._changed:
            if len(self._waiting) >= self._max_waiting:
                return False
            self._waiting.append(ticket)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Answer what is queued, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        while group := self._next_group():
            self._answer(group)

    def _next_group(self) -> list[Ticket]:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            group: list[Ticket] = []
            rows = 0
            while self._waiting:
                rows += self._waiting[0].rows
                if group and rows > self._group_rows:
                    break
                group.append(self._waiting.popleft())
            return group
