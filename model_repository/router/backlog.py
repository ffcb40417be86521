# SPDX-License-Identifier: Apache-2.0
"""The requests that wait in a lane: a bounded backlog, with equal shares of work for callers."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from choose import RequestRefused

# The server passes `timeout` on as an unsigned number: -1 arrives as 2^64 - 1. A week is forever.
NEGATIVE_US = 2**63
LONGEST_US = 7 * 24 * 3600 * 10**6
MAX_REQUESTS = 4 * 64  # four batches of single images
REQUESTS_A_GROUP = 16  # or as many for each group in flight
MAX_BYTES = 512 * 2**20
BEHIND_SHARE = 0.1  # of a lane's time for requests that wait behind others
QUIET_S = 2.0  # after the last other request, they need not share

Seconds = Callable[[float, float], float]  # estimated time for work and megapixels
Ready = Callable[["Ticket"], bool]


class Ticket(NamedTuple):
    """A request, its cost, and the time until which its caller waits."""

    role: str  # role of the component that it is for
    inputs: dict[str, Any]  # arrays by name; encoded images as an array of bytes
    rows: int
    parameters: dict[str, Any]  # the family's own parameters, checked
    wanted: tuple[str, ...]
    sender: Any
    deadline_s: float | None  # in time.monotonic(); None if the caller set no timeout
    arrived_s: float
    caller: str = ""  # callers share a lane equally; all without a name count as one
    work: float = 1.0  # rows; for a search: rows times hypotheses times steps
    megapixels: float = 0.0  # to decode, according to the files' headers
    size: int = 0  # bytes of the inputs
    policy: str = ""  # the policy that the request follows, if it is a chain of one variant
    adapted: Any = None  # what the answer says about the load-adaptive choice, if there was one
    space: str = ""  # the variant in whose space the embeddings are; empty: the one that answers
    behind: bool = False  # whether its caller has used up its allowance, so others go first
    sampled: Any = None  # the row whose answer the monitor compares with the full model's

    @property
    def line(self) -> tuple[bool, str]:
        """The line in which it waits; those in front come first."""
        return self.behind, self.caller

    @property
    def is_late(self) -> bool:
        """True if the caller's time has run out."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def left_s(self) -> float:
        """Time for which the caller still waits; infinite without a timeout."""
        return float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def waited_s(self) -> float:
        """Time since the request arrived in the router."""
        return time.monotonic() - self.arrived_s


def deadline(timeout_us: int, now_s: float) -> float | None:
    """Return the deadline of a request; None without a timeout.

    Raises: RequestRefused for a negative timeout.
    """
    if timeout_us >= NEGATIVE_US or timeout_us < 0:
        signed = timeout_us - 2**64 if timeout_us > 0 else timeout_us
        raise RequestRefused(
            f"the request's timeout is {signed} microseconds, expected 1 or more, or 0 for none"
        )
    return now_s + time_for(timeout_us) if timeout_us else None


def time_for(timeout_us: int) -> float:
    """Return the seconds that a caller waits; infinite without a timeout."""
    return min(timeout_us, LONGEST_US) / 1e6 if timeout_us else float("inf")


def caller_of(request_id: str) -> str:
    """Return the caller's name: the part of a request's id before its first slash."""
    name, slash, _ = request_id.partition("/")
    return name[:64] if slash else ""


class Line:
    """The waiting requests of one caller, and their total cost."""

    def __init__(self, done: float = 0.0) -> None:
        self.tickets: deque[Ticket] = deque()
        self.work, self.megapixels, self.size = 0.0, 0.0, 0
        self.adapting = 0  # requests that adapt to the load
        self.done = done  # work done for the caller so far

    def add(self, ticket: Ticket) -> None:
        """Add a request at the end."""
        self.tickets.append(ticket)
        self._count(ticket, 1)

    def next(self, seconds: Seconds, ready: Ready) -> int | None:
        """Return the place of the oldest request that is ready; of the newest, if it will be late.

        None if no request is ready.
        """
        at = next((at for at, ticket in enumerate(self.tickets) if ready(ticket)), None)
        if at is None:
            return None
        oldest = self.tickets[at]
        if oldest.left_s >= seconds(oldest.work, oldest.megapixels):
            return at
        last = len(self.tickets) - 1
        return next(at for at in range(last, -1, -1) if ready(self.tickets[at]))

    def remove(self, at: int) -> Ticket:
        """Remove the request at a place; 0 is the oldest."""
        ticket = self.tickets[at]
        del self.tickets[at]
        self._count(ticket, -1)
        return ticket

    def replace(self, old: Ticket, new: Ticket | None) -> bool:
        """Put another request in the place of one, or nothing; False if it is not here."""
        at = next((at for at, ticket in enumerate(self.tickets) if ticket is old), None)
        if at is None:
            return False
        del self.tickets[at]
        self._count(old, -1)
        if new is not None:
            self.tickets.insert(at, new)
            self._count(new, 1)
        return True

    def copy(self) -> "Line":
        """Return a line that can be changed alone."""
        copy = Line(self.done)
        copy.tickets, copy.work = self.tickets.copy(), self.work
        copy.megapixels, copy.size, copy.adapting = self.megapixels, self.size, self.adapting
        return copy

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.work += sign * ticket.work
        self.megapixels += sign * ticket.megapixels
        self.size += sign * ticket.size
        self.adapting += sign * (ticket.adapted is not None)


class Backlog:
    """The waiting requests of one lane.

    The next request comes from the caller with the least work done so far. A caller that returns
    after a pause counts as the one with the least work among those that wait.

    Requests that wait behind others are answered one at a time while no other one waits, and get a
    small part of the lane's time: another one that arrives would have to wait for them.
    """

    def __init__(self, in_flight: int = 1) -> None:
        self.most = max(MAX_REQUESTS, REQUESTS_A_GROUP * in_flight)
        self._lines: dict[tuple[bool, str], Line] = {}
        self._least = 0.0  # work done for the last served caller before that
        self.others_s = -math.inf  # last arrival of a request that does not wait behind others
        self._resumed_s = -math.inf  # when those that do may run
        self._behind_since_s: float | None = None  # start of the group, if it waited behind others

    @property
    def pause_s(self) -> float:
        """Seconds until requests that wait behind others may run, if there is no other one."""
        now_s = time.monotonic()
        return max(0.0, self._resumed_s - now_s) if now_s - self.others_s <= QUIET_S else 0.0

    @property
    def requests(self) -> int:
        """Number of waiting requests."""
        return sum(len(line.tickets) for line in self._lines.values())

    @property
    def adapting(self) -> int:
        """Number of waiting requests that adapt to the load."""
        return sum(line.adapting for line in self._lines.values())

    @property
    def tickets(self) -> Iterator[Ticket]:
        """All waiting requests."""
        return (ticket for line in self._lines.values() for ticket in line.tickets)

    @property
    def cost(self) -> tuple[float, float]:
        """Work and megapixels of all waiting requests."""
        lines = self._lines.values()
        return sum(line.work for line in lines), sum(line.megapixels for line in lines)

    def add(self, ticket: Ticket) -> None:
        """Add a request at the end of its caller's line."""
        self._lines.setdefault(ticket.line, Line(self._least)).add(ticket)
        if not ticket.behind:
            self.others_s = time.monotonic()

    def take(self, rows: int, seconds: Seconds, ready: Ready = lambda ticket: True) -> list[Ticket]:
        """Remove and return the next requests that are ready: at most `rows` rows, or one request.

        If a caller's oldest request will be too late, its newest is answered first. No request
        joins a group that would then be too late for one of its requests.
        """
        if self._behind_since_s is not None:
            now_s = time.monotonic()
            self._resumed_s = now_s + (1 / BEHIND_SHARE - 1) * (now_s - self._behind_since_s)
            self._behind_since_s = None
        group: list[Ticket] = []
        used, work, megapixels, time_s = 0, 0.0, 0.0, float("inf")
        unready: set[tuple[bool, str]] = set()
        while lines := self._lines.keys() - unready:
            key = min(lines, key=lambda key: (key[0], self._lines[key].done))
            line, (behind, _) = self._lines[key], key
            if behind and (group or unready or self.pause_s):
                break
            at = line.next(seconds, ready)
            if at is None:
                unready.add(key)
                continue
            ticket = line.tickets[at]
            used, work = used + ticket.rows, work + ticket.work
            megapixels, time_s = megapixels + ticket.megapixels, min(time_s, ticket.left_s)
            if group and (used > rows or seconds(work, megapixels) > time_s):
                break
            self._least = self._least if behind else line.done
            line.done += ticket.work
            group.append(self._remove(key, at))
            if behind:
                self._behind_since_s = time.monotonic()
                break
        return group

    def upcoming(self, rows: int, seconds: Seconds) -> list[Ticket]:
        """Return the requests that `take` would remove now, without removing them."""
        copy = Backlog()
        copy._lines = {key: line.copy() for key, line in self._lines.items()}
        return copy.take(rows, seconds)

    def replace(self, old: Ticket, new: Ticket | None) -> bool:
        """Put another request of the same caller in the place of one, or nothing.

        Returns False if it no longer waits.
        """
        line = self._lines.get(old.line)
        if line is None or not line.replace(old, new):
            return False
        if not line.tickets:
            del self._lines[old.line]
        return True

    def expired(self) -> list[Ticket]:
        """Remove and return the requests whose time has run out."""
        expired, now_s = [], time.monotonic()
        for key, line in list(self._lines.items()):
            late = [
                ticket.deadline_s is not None and ticket.deadline_s <= now_s
                for ticket in line.tickets
            ]
            if not any(late):
                continue
            for is_late in late:
                ticket = line.remove(0)
                expired.append(ticket) if is_late else line.add(ticket)
            if not line.tickets:
                del self._lines[key]
        return expired

    def ahead_of(self, ticket: Ticket) -> tuple[float, float]:
        """Return the work and megapixels that are done before a request that arrives now.

        Of each other caller's work, at most as much counts as its own caller has.
        """
        own = self._lines.get(ticket.line)
        mine = ticket.work + (own.work if own else 0.0)
        work, megapixels = 0.0, 0.0
        for (behind, _), line in self._lines.items():
            if behind > ticket.behind:
                continue
            in_front = line is own or ticket.behind > behind
            share = 1.0 if in_front else min(1.0, mine / line.work)
            work += share * line.work
            megapixels += share * line.megapixels
        return work, megapixels

    def make_room(self, ticket: Ticket) -> list[Ticket] | None:
        """Make room for a request: remove the newest requests of callers with more waiting work.

        Returns the removed requests, or None if there is no room.
        """
        removed: list[Ticket] = []
        while self._lines and self._is_full(ticket):
            heaviest = max(self._lines, key=lambda key: (key[0], self._lines[key].work))
            own = self._lines.get(ticket.line)
            mine = ticket.work + (own.work if own else 0.0)
            alike = heaviest[0] == ticket.behind and self._lines[heaviest].work <= mine
            if heaviest == ticket.line or alike or heaviest[0] < ticket.behind:
                for other in reversed(removed):
                    self.add(other)
                return None
            removed.append(self._remove(heaviest, len(self._lines[heaviest].tickets) - 1))
        return removed

    def _is_full(self, ticket: Ticket) -> bool:
        size = sum(line.size for line in self._lines.values())
        return self.requests >= self.most or size + ticket.size > MAX_BYTES

    def _remove(self, key: tuple[bool, str], at: int) -> Ticket:
        ticket = self._lines[key].remove(at)
        if not self._lines[key].tickets:
            del self._lines[key]
        return ticket
