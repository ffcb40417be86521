# SPDX-License-Identifier: Apache-2.0
"""Requests sized by time: how many samples the next one gets, and how long it may take.

A client that sent as many images as a request may contain would wait for a large model longer than
anyone waits for a server that hangs. Requests therefore start with one sample and grow while they
take less than about a second, and each gets time in proportion to what earlier ones needed.
"""

import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client.connection import ServerRefusedImage
from saccade.serving.client.images import MAX_IMAGES
from saccade.serving.client.wire import Call, Steps

FIRST_ROWS = 1  # samples of the first request of a kind
TARGET_S = 1.0  # a request should take about this time: short enough to show progress
GROWTH = 4  # a request has at most this many times the samples of the one before
FIRST_S = 120.0  # time limit while nothing was measured: the model may be large or just starting
LEAST_S = 30.0  # shortest later time limit, since other callers may come at any time
TIMES = 10.0  # a request may take this many times as long as expected
_IN_TIME = 4.0  # a request should need at most this part of a time limit that the caller set
_KINDS = 64  # kinds of requests whose pace a client remembers
_SAMPLE = re.compile(r"\bsample (\d+)")
_T = TypeVar("_T")


class RequestSizes:
    """Sizes and time limits of successive requests of one kind.

    Units: timeout_s is the caller's own limit for each request; None: from the measured pace.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.rows = FIRST_ROWS  # of the next request
        self._row_s: float | None = None  # time per sample of the last request
        self._timeout_s = timeout_s
        self._target_s = TARGET_S if timeout_s is None else min(TARGET_S, timeout_s / _IN_TIME)

    def limit_s(self, rows: int) -> float:
        """Return the time limit of a request with this many samples."""
        if self._timeout_s is not None:
            return self._timeout_s
        if self._row_s is None:
            return FIRST_S
        return max(LEAST_S, TIMES * rows * self._row_s)

    def add(self, rows: int, seconds: float) -> None:
        """Record that a request was answered."""
        self._row_s = seconds / rows
        in_time = self._target_s / self._row_s if seconds > 0 else MAX_IMAGES
        # The last request of a call is small because no sample is left.
        most = min(MAX_IMAGES, GROWTH * max(rows, self.rows))
        self.rows = max(1, min(most, int(in_time)))


@dataclass(frozen=True)
class Watch:
    """What to call while an operation's first call is answered in several requests.

    `answered` receives the number of samples. With `refused`, which receives the index of an image
    and the error, images that the server refuses are left out of the answer.
    """

    answered: Callable[[int], None] = lambda rows: None
    refused: Callable[[int, ServerRefusedImage], None] | None = None


UNWATCHED = Watch()


class Pacing:
    """Splits the calls of one client's operations into requests, at the pace of each kind."""

    def __init__(
        self, timeout_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sizes = lru_cache(_KINDS)(lambda kind: RequestSizes(timeout_s))
        self._clock = clock

    def requests(self, steps: Steps[_T], watch: Watch = UNWATCHED) -> Steps[_T]:
        """Yield the requests of an operation; the operation gets a list of answers to each call.

        Raises: ImageRefused with the index among all samples; ServerFailed that says how many
            samples were answered before.
        """
        try:
            call = next(steps)
            while True:
                if call is None:
                    call = steps.send((yield None))
                    continue
                sent = _Split(call, self._sizes(call.kind), watch, self._clock)
                call, watch = steps.send((yield from sent.requests())), UNWATCHED
        except StopIteration as end:
            returned: _T = end.value
            return returned


class _Split:
    """One call, as requests that are sent one after the other."""

    def __init__(
        self, call: Call, sizes: RequestSizes, watch: Watch, clock: Callable[[], float]
    ) -> None:
        self._call, self._sizes, self._watch, self._clock = call, sizes, watch, clock
        self._began_s = clock()
        self._at = 0  # index of the next sample
        self._refused: dict[int, ServerRefusedImage] = {}

    def requests(self) -> Generator[Call, Any, list[Any]]:
        results = []
        while self._at < self._call.rows:
            if self._at in self._refused:
                self._at += 1
                continue
            part = self._next()
            sent_s = self._clock()
            try:
                answer = yield part
            except ServerRefusedImage as error:
                self._leave_out(error)
                continue
            except SaccadeError as error:
                raise self._located(error) from error
            self._sizes.add(part.rows, self._clock() - sent_s)
            self._at += part.rows
            self._watch.answered(part.rows)
            results.append(answer)
        if not results:
            raise self._refused[min(self._refused)]
        return results

    def _next(self) -> Call:
        end = min((index for index in self._refused if index > self._at), default=self._call.rows)
        part = self._call.part(self._at, min(end, self._at + self._sizes.rows))
        return replace(part, timeout_s=self._sizes.limit_s(part.rows))

    def _leave_out(self, error: ServerRefusedImage) -> None:
        index = self._at + error.index
        if self._call.rows > 1:
            error = ServerRefusedImage(
                error.where, f"image {index}: {error.reason}", index, error.reason
            )
        if self._watch.refused is None:
            raise error
        self._watch.refused(index, error)
        self._refused[index] = error

    def _located(self, error: SaccadeError) -> SaccadeError:
        """Return an error of one of several requests with its place among all samples."""
        total, at = self._call.rows, self._at
        if isinstance(error, ServerFailed) and total > 1:
            seconds = self._clock() - self._began_s
            text = f"{error} {at:,} of {total:,} samples were answered in {seconds:.3g} s."
            return ServerFailed(text, retry=error.retry, status=error.status)
        if type(error) is SaccadeError:  # the router numbers the samples of its request
            return SaccadeError(
                _SAMPLE.sub(lambda found: f"sample {at + int(found[1])}", str(error))
            )
        return error
