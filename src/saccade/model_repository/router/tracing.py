# SPDX-License-Identifier: Apache-2.0
"""Spans of what a model does with a request, sent by OTLP where the environment names an endpoint.

The router and the onnxruntime backend run this file, each in its own process, and `saccade serve`
reads its rules. Without an endpoint nothing of OpenTelemetry is imported. Spans wait in a bounded
queue that a thread empties: a receiver that is down or slow costs spans and no request.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# As the specification names them, the one for traces before the one for all signals.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
CONTEXT = ("traceparent", "tracestate")  # of W3C Trace Context
# From the router to the backend, which runs the requests of several callers at once: the
# `traceparent` of each, with commas between.
CALLERS = "saccade_traceparents"
MOST_CONTEXT = 512  # characters of each that are read; the recommendation asks for no more
MOST_CALLERS = 64  # as many requests as a run has rows at most
DELAY_MS = 1000  # between two exports: what a process that is killed loses
CLOSE_S = 2.0  # for what is still in the queue when the process ends
WARN_EVERY_S = 60.0
SENDERS = ("opentelemetry.sdk", "opentelemetry.exporter")  # whose warnings are of sending
MOST_WARNING = 300  # characters
TRIES, NEAR_NS = 3, 20_000


def wants_tracing(environment: Mapping[str, str]) -> bool:
    """True if the environment names an endpoint and does not switch traces off."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    named = any(environment.get(name, "").strip() for name in ENDPOINTS)
    return named and not off and "otlp" in exporters.split(",")


def obstacle(environment: Mapping[str, str]) -> str:
    """Why spans cannot be sent although an endpoint is named; empty if they can."""
    spoken = [value for name in PROTOCOLS if (value := environment.get(name, "").strip())]
    if spoken and spoken[0] != PROTOCOL:
        return f"the protocol is {spoken[0]!r:.40}, and only {PROTOCOL} is spoken"
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        return f"{error}; install it with: pip install 'saccade-serving[trace]'"
    return ""


def spans_of(
    model: str, environment: Mapping[str, str], warn: Callable[[str], None]
) -> Spans | None:
    """The spans of a model's process; none where the environment asks for none."""
    if not wants_tracing(environment):
        return None
    try:
        reason = obstacle(environment)
        if not reason:
            return Spans(model, environment, warn)
    except Exception as error:  # such as a figure of the environment that is no number
        reason = repr(error)
    warn(f"no spans are sent: {reason}"[:MOST_WARNING])
    return None


class Spans:
    """Starts the spans of one process and sends those that a caller, or the sampler, wants."""

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
        # The sampler is the environment's; by default a caller's flag decides, and who sends no
        # context is traced.
        self._provider = TracerProvider(
            resource=Resource.create(attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=delay_ms)
        )
        self._tracer = self._provider.get_tracer("saccade")
        self._propagator = TraceContextTextMapPropagator()
        self._api, self._empty = trace, Context()

    def server_span(self, name: str, given: Mapping[str, Any], start_ns: int) -> Any:
        """The span of a request, below its caller's where one is named; None if not sampled.

        `given` are the request's parameters: what is no context of W3C is ignored.
        """
        return self._recorded(name, self._context_in(given), start_ns, self._api.SpanKind.SERVER)

    def child(self, name: str, parent: Any, start_ns: int) -> Any:
        """A span below another one of this process."""
        below = self._api.set_span_in_context(parent, self._empty)
        return self._tracer.start_span(name, context=below, start_time=start_ns)

    def run_spans(self, name: str, given: list[Mapping[str, Any]], start_ns: int) -> list[Any]:
        """A span of one run below each caller of its requests; `given` are their parameters."""
        contexts: list[Mapping[str, Any]] = []
        for parameters in given:
            listed = parameters.get(CALLERS)
            if isinstance(listed, str):
                some = listed.split(",", MOST_CALLERS)[:MOST_CALLERS]
                contexts += [{CONTEXT[0]: one} for one in some]
            else:
                contexts.append(parameters)
        parents = [self._context_in(context) for context in contexts[:MOST_CALLERS]]
        # A run for nobody who is traced, such as a probe's, begins no trace of its own.
        known = [parent for parent in parents if self._span_in(parent).is_valid]
        kind = self._api.SpanKind.INTERNAL
        spans = [self._recorded(name, parent, start_ns, kind) for parent in known]
        return [span for span in spans if span is not None]

    def callers(self, spans: list[Any]) -> dict[str, str]:
        """The parameter that tells the backend for whom it runs."""
        texts: list[str] = []
        for span in spans[:MOST_CALLERS]:
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, self._api.set_span_in_context(span, self._empty))
            texts.append(carrier[CONTEXT[0]])
        return {CALLERS: ",".join(texts)}

    def fail(self, span: Any) -> None:
        """Mark a span as that of a failure; the words stay in the answer and the log."""
        span.set_status(self._api.StatusCode.ERROR)

    def close(self) -> None:
        """Send what waits, for as long as that may take."""
        # The library's own limit does not hold while a request to the receiver is under way.
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


class Clock:
    """Turns times of `time.monotonic()` into those of spans, so that no child begins too early."""

    def __init__(self) -> None:
        for _ in range(TRIES):  # a process that is put aside between the two would be off by that
            before_ns, now_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            if after_ns - before_ns < NEAR_NS:
                break
        self._offset_ns = now_ns - (before_ns + after_ns) // 2

    def ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970."""
        return self._offset_ns + int(monotonic_s * 1e9)


class Warnings(logging.Handler):
    """The library's own log: a line a minute, for a receiver may be down for hours."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn, self._next_s = warn, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, on one line and without a trace; of what callers sent, nothing."""
        if time.monotonic() < self._next_s or not record.name.startswith(SENDERS):
            return
        self._next_s = time.monotonic() + WARN_EVERY_S
        try:
            text = " ".join(record.getMessage().split())
        except Exception:
            text = "no spans are sent"
        self._warn(f"OpenTelemetry: {text}"[:MOST_WARNING])


def quieten(warn: Callable[[str], None]) -> None:
    """Let the library's log come out in one place, seldom."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [Warnings(warn)]
