# SPDX-License-Identifier: Apache-2.0
"""A call takes the context of the application's active span along, and loads nothing to do so."""

import subprocess
import sys

import pytest

from saccade.serving.client.client import Session
from saccade.serving.client.wire import Call, with_deadline


@pytest.fixture
def tracer():
    sdk = pytest.importorskip(
        "opentelemetry.sdk.trace", reason="not installed: pip install '.[trace]'"
    )
    return sdk.TracerProvider().get_tracer("application")


def test_an_active_span_goes_along(tracer):
    with tracer.start_as_current_span("parent") as span:
        (headers,) = [Session()._arguments(Call({}, (), {}))["headers"]]
    context = span.get_span_context()
    identity = f"{context.trace_id:032x}-{context.span_id:016x}"
    assert headers == {"traceparent": f"00-{identity}-{context.trace_flags:02x}"}
    assert with_deadline({}, 1)["headers"] is None  # the span has ended


def test_the_state_of_other_vendors_goes_along_and_baggage_does_not(tracer):
    from opentelemetry import baggage, context, trace

    state = trace.TraceState([("vendor", "value")])
    parent = trace.SpanContext(1, 2, True, trace.TraceFlags(0), state)
    held = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    token = context.attach(baggage.set_baggage("secret", "value", held))
    try:
        headers = with_deadline({}, 1)["headers"]
    finally:
        context.detach(token)
    assert headers == {"traceparent": f"00-{1:032x}-{2:016x}-00", "tracestate": "vendor=value"}


def test_without_a_span_nothing_is_imported():
    code = (
        "import sys; from saccade.serving.client.wire import with_deadline;"
        "assert with_deadline({}, 1)['headers'] is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
