# SPDX-License-Identifier: Apache-2.0
"""Send spans of a model's work on a request by OTLP, if the environment names an endpoint.

The router and the Python backends run this file, each in its own process, and `saccade serve`
applies its rules. Without an endpoint nothing of OpenTelemetry is imported. Spans wait in a bounded
queue that a thread empties: if a receiver is down or slow, spans are lost but no request is.

The router also logs one line per refused or failed request, which `saccade serve` reads. Number and
size of these lines are limited: a caller that is refused a thousand times per second must not fill
a disk.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# Names from the specification: the one for traces takes precedence over the one for all signals.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
CONTEXT = ("traceparent", "tracestate")  # of W3C Trace Context
# From the router to the backend, which runs requests of several callers together: the
# `traceparent` of each, separated by commas.
CALLERS = "saccade_traceparents"
MOST_CONTEXT = 512  # characters of each that are read; the recommendation requires no more
MOST_CALLERS = 64  # a run has at most this many rows, and so at most this many requests
DELAY_MS = 1000  # between two exports; a killed process loses the spans of this time
CLOSE_S = 2.0  # time to send the rest of the queue when the process exits
WARN_EVERY_S = 60.0
SENDERS = ("opentelemetry.sdk", "opentelemetry.exporter")  # loggers with warnings about sending
MOST_WARNING = 300  # characters
TRIES, NEAR_NS = 3, 20_000


def wants_tracing(environment: Mapping[str, str]) -> bool:
    """Return whether the environment names an endpoint and does not turn traces off."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    named = any(environment.get(name, "").strip() for name in ENDPOINTS)
    return named and not off and "otlp" in exporters.split(",")


def obstacle(environment: Mapping[str, str]) -> str:
    """Return why spans cannot be sent although an endpoint is named; empty if they can."""
    spoken = [value for name in PROTOCOLS if (value := environment.get(name, "").strip())]
    if spoken and spoken[0] != PROTOCOL:
        return f"the protocol is {spoken[0]!r:.40}, expected {PROTOCOL}"
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        return f"{error}; install saccade with the extra `trace`"
    return ""


def spans_of(
    model: str, environment: Mapping[str, str], warn: Callable[[str], None]
) -> Spans | None:
    """Return the spans of a model's process; None if the environment does not turn them on."""
    if not wants_tracing(environment):
        return None
    try:
        reason = obstacle(environment)
        if not reason:
            return Spans(model, environment, warn)
    except Exception as error:  # such as an environment variable that is not a number
        reason = repr(error)
    warn(f"no spans are sent: {reason}"[:MOST_WARNING])
    return None


class Spans:
    """Starts the spans of one process, and sends those that the caller or the sampler selects."""

    def __init__(
        self, model: str, environment: Mapping[str, str], warn: Callable[[str], None]
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        quieten(warn)
        attributes = {"saccade.model": model}
        if "OTEL_SERVICE_NAME" not in environment and "service.name=" not in environment.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            attributes["service.name"] = "saccade"
        delay_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in environment else DELAY_MS
        # The environment sets the sampler. By default a caller's flag decides, and requests without
        # a context are traced.
        self._provider = TracerProvider(
            resource=Resource.create(attributes), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(session=unread_session(environment))
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms)
        )
        self._tracer = self._provider.get_tracer("saccade")
        self._propagator = TraceContextTextMapPropagator()
        self._api, self._empty = trace, Context()

    def server_span(self, name: str, given: Mapping[str, Any], start_ns: int) -> Any:
        """Start the span of a request, as a child of its caller's if named; None if not sampled.

        `given` are the request's parameters. Those that are not W3C Trace Context are ignored.
        """
        return self._recorded(name, self._context_in(given), start_ns, self._api.SpanKind.SERVER)

    def child(self, name: str, parent: Any, start_ns: int) -> Any:
        """Start a child of another span of this process."""
        below = self._api.set_span_in_context(parent, self._empty)
        return self._tracer.start_span(name, context=below, start_time=start_ns)

    def run_spans(self, name: str, given: list[Mapping[str, Any]], start_ns: int) -> list[Any]:
        """Start a span of one run for each caller; `given` are the requests' parameters."""
        contexts: list[Mapping[str, Any]] = []
        for parameters in given:
            listed = parameters.get(CALLERS)
            if isinstance(listed, str):
                some = listed.split(",", MOST_CALLERS)[:MOST_CALLERS]
                contexts += [{CONTEXT[0]: one} for one in some]
            else:
                contexts.append(parameters)
        parents = [self._context_in(context) for context in contexts[:MOST_CALLERS]]
        # A run without traced callers, such as for a probe, does not start a new trace.
        known = [parent for parent in parents if self._span_in(parent).is_valid]
        kind = self._api.SpanKind.INTERNAL
        spans = [self._recorded(name, parent, start_ns, kind) for parent in known]
        return [span for span in spans if span is not None]

    def callers(self, spans: list[Any]) -> dict[str, str]:
        """Return the parameter with which the backend learns the callers of a run."""
        texts: list[str] = []
        for span in spans[:MOST_CALLERS]:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, self._api.set_span_in_context(span, self._empty))
            texts.append(carrier[CONTEXT[0]])
        return {CALLERS: ",".join(texts)}

    def fail(self, span: Any) -> None:
        """Mark a span as failed; the message is only in the answer and the log."""
        span.set_status(self._api.StatusCode.ERROR)

    def close(self) -> None:
        """Send the waiting spans, within the time limit."""
        # The library's own limit does not apply during a request to the receiver.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _context_in(self, given: Mapping[str, Any]) -> Any:
        carrier = {
            key.lower(): value
            for key, value in given.items()
            if key.lower() in CONTEXT and isinstance(value, str) and len(value) <= MOST_CONTEXT
        }
        return self._propagator.extract(carrier, context=self._empty)

    def _span_in(self, context: Any) -> Any:
        return self._api.get_current_span(context).get_span_context()

    def _recorded(self, name: str, parent: Any, start_ns: int, kind: Any) -> Any:
        span = self._tracer.start_span(name, context=parent, kind=kind, start_time=start_ns)
        return span if span.is_recording() else None


def unread_session(environment: Mapping[str, str]) -> Any:
    """Return an HTTP session that reads no answer beyond its head: a receiver's may never end.

    None if the environment names another session, with the user's credentials.
    """
    import requests

    if any(name.endswith("_CREDENTIAL_PROVIDER") for name in environment):
        return None
    session = requests.Session()
    session.hooks["response"].append(lambda response, **_: response.close())
    return session


class Clock:
    """Converts times of `time.monotonic()` for spans, so that no child starts too early."""

    def __init__(self) -> None:
        for _ in range(TRIES):  # repeat if the process was suspended between the two readings
            before_ns, now_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            if after_ns - before_ns < NEAR_NS:
                break
        self._offset_ns = now_ns - (before_ns + after_ns) // 2

    def ns(self, monotonic_s: float) -> int:
        """Return nanoseconds since 1970."""
        return self._offset_ns + int(monotonic_s * 1e9)


class Warnings(logging.Handler):
    """Handler of the library's log: one line per minute, since a receiver may be down for hours."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn, self._next_s = warn, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Log the message on one line, without a trace and without data of callers."""
        if time.monotonic() < self._next_s or not record.name.startswith(SENDERS):
            return
        self._next_s = time.monotonic() + WARN_EVERY_S
        try:
            text = " ".join(record.getMessage().split())
        except Exception:
            text = "no spans are sent"
        self._warn(f"OpenTelemetry: {text}"[:MOST_WARNING])


def quieten(warn: Callable[[str], None]) -> None:
    """Send the library's log to one place, at a limited rate."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [Warnings(warn)]


# Set by `saccade serve --log-format json`, or by users who run the server without `saccade serve`.
REQUEST_LOG = "SACCADE_REQUEST_LOG"
REQUEST_LINE = "saccade-request "  # prefix of the message of such a line; JSON follows
# Fields of the JSON. Times are in seconds: waiting in the lane, and decoding plus running.
FIELDS = {
    "model": str, "request_id": str, "variant": str, "code": str, "reason": str,
    "waited_s": float, "run_s": float, "left_out": int,
}  # fmt: skip
MOST_ID, MOST_REASON = 128, 500  # characters
LINES_A_SECOND, MOST_LINES = 20.0, 100.0


class RequestLog:
    """Writes a limited number of lines per second; the next line has the number left out."""

    def __init__(self, model: str, write: Callable[[str], None]) -> None:
        self._model, self._write = model, write
        self._lock = threading.Lock()
        self._lines, self._since_s, self._left_out = MOST_LINES, time.monotonic(), 0

    def add(
        self,
        *,
        request_id: str,
        variant: str,
        code: str,
        reason: str,
        waited_s: float,
        run_s: float,
    ) -> None:
        """Write the line of a request, or count it as left out.

        Units: waited_s and run_s are seconds.
        """
        with self._lock:
            now = time.monotonic()
            earned = LINES_A_SECOND * (now - self._since_s)
            self._lines, self._since_s = min(MOST_LINES, self._lines + earned), now
            if self._lines < 1:
                self._left_out += 1
                return
            self._lines -= 1
            left_out, self._left_out = self._left_out, 0
        content: dict[str, Any] = {
            "model": self._model,
            "request_id": printable(request_id, MOST_ID),
            "variant": variant,
            "code": code,
            "reason": _printable_lines(reason),
            "waited_s": round(waited_s, 6),
            "run_s": round(run_s, 6),
        }
        if left_out:
            content["left_out"] = left_out
        self._write(REQUEST_LINE + json.dumps(content))


def _printable_lines(reason: str) -> str:
    """Return a reason whose lines are kept; its reader shows the further ones as detail."""
    lines = reason[:MOST_REASON].split("\n")
    return "\n".join(printable(line, MOST_REASON) for line in lines)[:MOST_REASON]


def printable(text: str, most: int) -> str:
    """Return the beginning of a caller's text, with control characters escaped."""
    beginning = text[:most]
    if not beginning.isprintable():
        beginning = "".join(
            letter if letter.isprintable() else repr(letter)[1:-1] for letter in beginning
        )
    return beginning[:most]
