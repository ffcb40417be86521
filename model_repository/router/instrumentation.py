# SPDX-License-Identifier: Apache-2.0
"""Observe requests on their way through the router: spans, and a log line for each failure.

Both are off unless the environment turns them on. If both are off, senders are not
wrapped, and nothing here runs for a request. An error here never fails a request.
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
from tracing import MOST_ID, REQUEST_LOG, Clock, RequestLog, printable, spans_of

if TYPE_CHECKING:
    from backlog import Ticket
    from routes import Route

MOST_CALLS = 128  # spans of calls per request: a search makes hundreds of calls
# Codes by their names in the server's module, which abbreviates one of gRPC's names.
CODES = {
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
}
OWN_FAILURES = ("UNAVAILABLE", "INTERNAL")  # server errors by OpenTelemetry's conventions

_P = ParamSpec("_P")
_calling = threading.local()  # the requests for which a lane's thread makes its calls


def harmless(function: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a function so that its errors are logged and not raised."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            pb.Logger.log_warn(f"a request could not be observed: {error!r:.200}")

    return guarded


class Instrumentation:
    """What is observed of the router's requests: spans, failures, both, or nothing."""

    def __init__(
        self, model: str, environment: Mapping[str, str] = os.environ, *, unwatched: str = ""
    ) -> None:
        """Set up spans and log from the environment.

        `unwatched` is the parameter that marks internal requests, which are not observed.
        """
        self.model, self.unwatched = model, unwatched
        self.spans = spans_of(model, environment, pb.Logger.log_warn)
        wants_log = environment.get(REQUEST_LOG) == "1"
        self.log = RequestLog(model, pb.Logger.log_warn) if wants_log else None
        self.on = self.spans is not None or self.log is not None

    def sender(self, request: Any, sender: Any) -> Any:
        """Return a request's sender, which observes the request if that is on."""
        return ObservedSender(sender, request, self) if self.on else sender

    def routed(self, ticket: Ticket, route: Route) -> None:
        """Note the variant that was chosen for a request."""
        if self.on:
            ticket.sender.watched.routed(ticket, route)

    def taken(self, group: Iterable[Ticket]) -> None:
        """Note that a lane has started on these requests."""
        if self.on:
            for ticket in group:
                ticket.sender.watched.taken()

    def decoded(self, ticket: Ticket, began_s: float, megapixels: Iterable[float]) -> None:
        """Note the images of a request that were decoded since `began_s`."""
        if self.on and ticket.sender.watched.span:
            ticket.sender.watched.decoded(began_s, megapixels)

    @contextmanager
    def calls_for(self, tickets: list[Ticket]) -> Iterator[None]:
        """Attribute all calls of this thread inside the context to these requests."""
        before = getattr(_calling, "senders", ())  # of a large request, between whose parts this is
        if self.spans:
            _calling.senders = [
                ticket.sender.watched for ticket in tickets if ticket.sender.watched.span
            ]
        try:
            yield
        finally:
            _calling.senders = before

    def close(self) -> None:
        """Send the waiting spans, within the time limit."""
        if self.spans:
            self.spans.close()


class ObservedSender:
    """A request's sender that records when the request arrived, waited, ran and was answered."""

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
        """This object; a wrapper around it has the same property."""
        return self

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return bool(self._sender.is_cancelled())

    def send(self, response: Any, flags: int) -> None:
        """Send the answer, which ends the request."""
        now = time.monotonic()  # the caller may have the answer before this thread resumes
        try:
            self._sender.send(response, flags=flags)
        except Exception:
            if response.has_error():
                self._end(response, now)  # otherwise an error is sent next
            raise
        self._end(response, now)

    @harmless
    def routed(self, ticket: Ticket, route: Route) -> None:
        """Note the request's variant, component and rows."""
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
        """Note that the request no longer waits."""
        self._taken_s = time.monotonic()
        if self.span:
            # A later step of a policy waits from the answer of the one before.
            since_s = self._began_s if self._called_s is None else self._called_s
            self._note("wait", since_s, self._taken_s, {})

    @harmless
    def decoded(self, began_s: float, megapixels: Iterable[float]) -> None:
        """Note the decoded images."""
        sizes = list(megapixels)
        size = round(sum(sizes), 6)
        attributes = {"saccade.images": len(sizes), "saccade.megapixels": size}
        self._note("decode", began_s, time.monotonic(), attributes)

    def call_span(self, model: str, rows: int, requests: int) -> Any:
        """Start a span of a call for this and perhaps other requests; None above the limit."""
        self._calls += 1
        if self._calls > MOST_CALLS or self._to.spans is None:
            return None
        span = self._to.spans.child("call", self.span, self._clock.ns(time.monotonic()))
        attributes = {"model": model, "call.rows": rows, "call.requests": requests}
        span.set_attributes({f"saccade.{name}": value for name, value in attributes.items()})
        return span

    @harmless
    def end_call(self, span: Any, *, failed: bool) -> None:
        """Note that the call returned."""
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
    """Observe one call of a model; yields the parameters that name its callers' spans, if any."""
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
    """Start a span of the call for each request; an error here only loses the spans."""
    try:
        spans = [(sender, sender.call_span(model, rows, len(senders))) for sender in senders]
        recorded = [span for _, span in spans if span is not None]
        to = senders[0]._to.spans
        return spans, {"parameters": to.callers(recorded)} if recorded and to else {}
    except Exception as error:
        pb.Logger.log_warn(f"a call could not be observed: {error!r:.200}")
        return [], {}


def code_name(error: Any) -> str:
    """Return gRPC's name of the code of an error."""
    known = {getattr(pb.TritonError, name, None): code for name, code in CODES.items()}
    return str(known.get(error.code(), "INTERNAL"))
