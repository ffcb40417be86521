# SPDX-License-Identifier: Apache-2.0
"""Threads that decode the images of waiting requests, for all lanes of a router.

The next image is of the caller for whom the fewest megapixels were decoded, and among its requests
of the one with the earliest deadline. A lane only offers the requests of its next groups. Large
images have threads with a low priority, so they use what the others leave.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from lane import OWN_MEGAPIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from backlog import Ticket
    from decoding import Decoding
    from lane import Lane

# A pixel takes up to 10 bytes while an image is decoded and resized.
MOST_MEGAPIXELS = 256.0
# An image of this size takes most of a second.
LARGE_MEGAPIXELS, LARGE_NICE = 24.0, 15
MOST_CALLERS = 1024


class Started:
    """A request of which some images have been given to threads."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.given = self.ended = 0  # images
        self.error: Exception | None = None

    @property
    def has_more(self) -> bool:
        """Whether an image is left to give; none after an error."""
        return self.error is None and self.given < len(self.decoding)


class Signal:
    """Wakes one of the threads that have looked for work and found none."""

    def __init__(self) -> None:
        self._changed, self.count = threading.Condition(threading.Lock()), 0

    def wake(self) -> None:
        """Let a thread look for work."""
        with self._changed:
            self.count += 1
            self._changed.notify()

    def wait(self, seen: int) -> None:
        """Wait until there was a call of `wake` since the count was `seen`."""
        with self._changed:
            while self.count == seen:
                self._changed.wait()


class DecodingPool:
    """Threads for each core: Pillow decodes without Python's lock."""

    def __init__(
        self,
        threads: int,
        begin: Callable[[Lane, Ticket], Decoding | None],
        most_megapixels: float = MOST_MEGAPIXELS,
    ) -> None:
        """`begin` returns the images of a lane's request, and raises what it is refused for."""
        self.threads, self._most_megapixels = threads, most_megapixels
        self._begin = begin
        self._lanes: tuple[Lane, ...] = ()
        self._choosing = threading.Lock()  # for what follows; a lane's own lock is taken inside it
        self._started: list[Started] = []
        self._megapixels = 0.0  # of the images that are being decoded
        self._done: dict[str, float] = {}  # megapixels by caller, since the pool was idle
        self._signals = {large: Signal() for large in (False, True)}
        self._closed = False
        self._threads: list[threading.Thread] = []

    def serve(self, lanes: Iterable[Lane]) -> None:
        """Begin to decode for these lanes."""
        self._lanes = tuple(lanes)
        self._threads = [
            threading.Thread(target=self._work, args=(large,), daemon=True)
            for _ in range(self.threads)
            for large in (False, True)
        ]
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Let a thread look for an image; a lane may call this inside its lock."""
        self._signals[False].wake()

    def close(self) -> None:
        """Stop the threads, after the lanes were closed."""
        self._closed = True
        for _ in range(self.threads):
            for signal in self._signals.values():
                signal.wake()
        for thread in self._threads:
            thread.join()

    def _work(self, large: bool) -> None:
        if large:
            with suppress(OSError):  # a system without priorities of threads
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LARGE_NICE)
        signal = self._signals[large]
        while not self._closed:
            seen = signal.count
            found = self._next(large)
            if found is None:
                signal.wait(seen)
            else:
                self._decode(*found)

    def _next(self, large: bool) -> tuple[Started, range, float] | None:
        """Return a request, which of its images are next, and their megapixels.

        These are all of a request whose images are small together, otherwise one.
        """
        with self._choosing:
            candidates = [*self._candidates()]
            if not candidates or len(self._done) > MOST_CALLERS:
                self._done.clear()
            for *_, ticket in candidates:  # who is new has as much as the one with the least
                self._done.setdefault(ticket.caller, min(self._done.values(), default=0.0))
            for started, lane, ticket in sorted(candidates, key=self._turn):
                size = ticket.megapixels / ticket.rows
                if (size > LARGE_MEGAPIXELS) is not large:
                    if not large:  # lanes wake the others
                        self._signals[True].wake()
                    continue
                if self._megapixels and self._megapixels + size > self._most_megapixels:
                    continue
                if (one := started or self._start(lane, ticket)) is None:
                    continue
                begun = one.given
                one.given = len(one.decoding) if ticket.megapixels <= OWN_MEGAPIXELS else begun + 1
                size *= one.given - begun
                self._megapixels += size
                self._done[ticket.caller] += size
                if ticket.megapixels > OWN_MEGAPIXELS:  # small ones mostly wait for Python's lock
                    self._signals[large].wake()  # another thread
                return one, range(begun, one.given), size
            return None

    def _candidates(self) -> Iterator[tuple[Started | None, Lane, Ticket]]:
        for one in self._started:
            if one.has_more:
                yield one, one.decoding.lane, one.decoding.ticket
        for lane in self._lanes:
            if (ticket := lane.to_decode()) is not None:
                yield None, lane, ticket

    def _turn(self, candidate: tuple[Started | None, Lane, Ticket]) -> tuple[object, ...]:
        ticket = candidate[2]
        deadline_s = float("inf") if ticket.deadline_s is None else ticket.deadline_s
        return ticket.behind, self._done[ticket.caller], deadline_s, ticket.arrived_s

    def _start(self, lane: Lane, ticket: Ticket) -> Started | None:
        if not lane.claim(ticket):
            return None
        try:
            decoding = self._begin(lane, ticket)
        except Exception as error:
            lane.decoded_ahead(ticket, 0.0, error)
            return None
        if decoding is None:  # decoded already
            lane.decoded_ahead(ticket, 0.0, None)
            return None
        self._started.append(started := Started(decoding))
        return started

    def _decode(self, started: Started, indices: range, size: float) -> None:
        error: Exception | None = None
        try:
            for index in indices:
                started.decoding.decode(index)
        except Exception as raised:
            error = raised
        with self._choosing:
            self._megapixels -= size
            started.ended += len(indices)
            started.error = started.error or error
            ended = started.ended == started.given and not started.has_more
            if ended:
                self._started.remove(started)
        if ended:
            self._end(started)

    def _end(self, started: Started) -> None:
        decoding, error = started.decoding, started.error
        try:
            decoding.end(complete=error is None)
        except Exception as raised:
            error = raised
        decoding.lane.decoded_ahead(decoding.ticket, decoding.seconds, error)
