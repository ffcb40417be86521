# SPDX-License-Identifier: Apache-2.0
"""A request's way through the router as others may watch it: spans, and a line where it failed.

Both are off unless the environment asks for them; the router then holds the server's own senders,
and nothing here is done for a request. What goes wrong here is never a request's failure.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import triton_python_backend_utils as pb
from image_size import megapixels
from request_log import MOST_ID, REQUEST_LOG, RequestLog, printable
from tracing import Clock, spans_of

if TYPE_CHECKING:
    from routes import Route
    from ticket import Ticket

MOST_CALLS = 128  # spans of calls of one request: a search makes hundreds
CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")
OWN_FAILURES = ("UNAVAILABLE", "INTERNAL")  # as OpenTelemetry judges a server's answers

_P = ParamSpec("_P")
_calling = threading.local()  # the requests that a lane's thread makes its calls for


def harmless(function: Callable[_P, None]) -> Callable[_P, None]:
    """The same function, whose errors are not its caller's."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            pb.Logger.log_warn(f"a request could not be watched: {error!r:.200}")

    return guarded


class Instrumentation:
    """What is watched of the router's requests: their spans, their failures, both, or nothing."""

    def __init__(
        self, model: str, environment: Mapping[str, str] = os.environ, *, unwatched: str = ""
    ) -> None:
        """`unwatched` is the parameter of requests that are none of a caller's."""
        self.model, self.unwatched = model, unwatched
        self.spans = spans_of(model, environment, pb.Logger.log_warn)
        wants_log = environment.get(REQUEST_LOG) == "1"
        self.log = RequestLog(model, pb.Logger.log_warn) if wants_log else None
        self.on = self.spans is not None or self.log is not None

    def sender(self, request: Any) -> Any:
        """A request's sender, which tells what becomes of it where that is watched."""
        sender = request.get_response_sender()
        return ObservedSender(sender, request, self) if self.on else sender

    def routed(self, ticket: Ticket, route: Route) -> None:
        """The variant of a request is known."""
        if self.on:
            ticket.sender.watched.routed(ticket, route)

    def taken(self, group: Iterable[Ticket]) -> None:
        """A lane has taken up these requests."""
        if self.on:
            for ticket in group:
                ticket.sender.watched.taken()

    @contextmanager
    def decoding(self, ticket: Ticket, files: list[bytes]) -> Iterator[None]:
        """The files of a request are decoded within."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            if self.on and ticket.sender.watched.span:
                ticket.sender.watched.decoded(began_s, files)

    @contextmanager
    def calls_for(self, tickets: list[Ticket]) -> Iterator[None]:
        """All calls of this thread within are made for these requests."""
        if self.spans:
            _calling.senders = [
                ticket.sender.watched for ticket in tickets if ticket.sender.watched.span
            ]
        try:
            yield
        finally:
            _calling.senders = ()

    def close(self) -> None:
        """Send what waits to be sent, for as long as that may take."""
        if self.spans:
            self.spans.close()


class ObservedSender:
    """The sender of one request, which knows when it came, waited, was run and was answered."""

    span: Any = None

    def __init__(self, sender: Any, request: Any, to: Instrumentation) -> None:
        self._sender, self._to = sender, to
        self._began_s, self._clock = time.monotonic(), Clock()
        self._taken_s: float | None = None
        self._called_s: float | None = None  # when the last call came back
        self._calls, self._ended = 0, False
        self._id, self._variant = "", ""
        self._begin(request)

    @property
    def watched(self) -> ObservedSender:
        """Itself: others may stand before it."""
        return self

    def is_cancelled(self) -> bool:
        """True if the caller has gone."""
        return bool(self._sender.is_cancelled())

    def send(self, response: Any, flags: int) -> None:
        """Send the answer, with which the request ends."""
        now = time.monotonic()  # its caller may have it before this thread goes on
        try:
            self._sender.send(response, flags=flags)
        except Exception:
            if response.has_error():
                self._end(response, now)  # else an error is sent next
            raise
        self._end(response, now)

    @harmless
    def routed(self, ticket: Ticket, route: Route) -> None:
        """Note what the request is for."""
        self._variant = route.name
        if not self.span:
            return
        self.span.set_attributes(
            {
                "saccade.variant": route.name,
                "saccade.budget": float(route.budget),
                "saccade.component": ticket.role,
                "saccade.rows": ticket.rows,
            }
        )

    @harmless
    def taken(self) -> None:
        """Note that the request waits no more."""
        self._taken_s = time.monotonic()
        if self.span:
            # A later step of a policy waits from the answer of the one before.
            since_s = self._began_s if self._called_s is None else self._called_s
            self._note("wait", since_s, self._taken_s, {})

    @harmless
    def decoded(self, began_s: float, files: list[bytes]) -> None:
        """Note what was decoded."""
        size = round(sum(map(megapixels, files)), 6)
        attributes = {"saccade.images": len(files), "saccade.megapixels": size}
        self._note("decode", began_s, time.monotonic(), attributes)

    def call_span(self, model: str, rows: int, requests: int) -> Any:
        """A span of one call for this request, and perhaps others; None beyond the most."""
        self._calls += 1
        if self._calls > MOST_CALLS or self._to.spans is None:
            return None
        span = self._to.spans.child("call", self.span, self._clock.ns(time.monotonic()))
        attributes = {"model": model, "call.rows": rows, "call.requests": requests}
        span.set_attributes({f"saccade.{name}": value for name, value in attributes.items()})
        return span

    @harmless
    def end_call(self, span: Any, *, failed: bool) -> None:
        """The call came back."""
        self._called_s = time.monotonic()
        if span is not None and self._to.spans is not None:
            if failed:
                self._to.spans.fail(span)
            span.end(self._clock.ns(self._called_s))

    @harmless
    def _begin(self, request: Any) -> None:
        self._id = request.request_id()[:MOST_ID]
        if self._to.spans:
            given = json.loads(request.parameters() or "{}")
            if self._to.unwatched in given:
                return
            began_ns = self._clock.ns(self._began_s)
            self.span = self._to.spans.server_span("saccade.request", given, began_ns)
        if self.span:
            known = {
                "saccade.model": self._to.model,
                "saccade.request_id": printable(self._id, MOST_ID),
            }
            self.span.set_attributes(known)

    def _note(self, name: str, start_s: float, stop_s: float, attributes: dict[str, Any]) -> None:
        assert self._to.spans is not None
        span = self._to.spans.child(name, self.span, self._clock.ns(start_s))
        span.set_attributes(attributes)
        span.end(self._clock.ns(stop_s))

    @harmless
    def _end(self, response: Any, now: float) -> None:
        if self._ended:
            return
        self._ended = True
        error = response.error() if response.has_error() else None
        code = code_name(error) if error else ""
        if self.span:
            self._end_span(now, code)
        if error and self._to.log:
            waited_s = (now if self._taken_s is None else self._taken_s) - self._began_s
            self._to.log.add(
                request_id=self._id,
                variant=self._variant,
                code=code,
                reason=error.message(),
                waited_s=waited_s,
                run_s=now - self._taken_s if self._taken_s else 0.0,
            )

    def _end_span(self, now: float, code: str) -> None:
        assert self._to.spans is not None
        if code:
            self.span.set_attribute("saccade.code", code)
            if code in OWN_FAILURES:
                self._to.spans.fail(self.span)
        elif self._called_s is not None:
            self._note("answer", self._called_s, now, {})
        if self._calls > MOST_CALLS:
            self.span.set_attribute("saccade.calls", self._calls)
        self.span.end(self._clock.ns(now))


@contextmanager
def called(model: str, rows: int) -> Iterator[dict[str, Any]]:
    """One call of a model; gives the parameters that name its callers' spans, if there are any."""
    senders = getattr(_calling, "senders", ())
    if not senders:
        yield {}
        return
    spans, told = begin_calls(senders, model, rows)
    failed = True
    try:
        yield told
        failed = False
    finally:
        for sender, span in spans:
            sender.end_call(span, failed=failed)


def begin_calls(
    senders: list[ObservedSender], model: str, rows: int
) -> tuple[list[tuple[ObservedSender, Any]], dict[str, Any]]:
    """A span of the call for each request; what goes wrong here costs the spans."""
    try:
        spans = [(sender, sender.call_span(model, rows, len(senders))) for sender in senders]
        recorded = [span for _, span in spans if span is not None]
        to = senders[0]._to.spans
        return spans, {"parameters": to.callers(recorded)} if recorded and to else {}
    except Exception as error:
        pb.Logger.log_warn(f"a call could not be watched: {error!r:.200}")
        return [], {}


def code_name(error: Any) -> str:
    """The protocol's code of an answer that is an error."""
    known = {getattr(pb.TritonError, name, None): name for name in CODES}
    return str(known.get(error.code(), "INTERNAL"))
