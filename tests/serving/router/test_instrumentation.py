# SPDX-License-Identifier: Apache-2.0
"""Spans and log lines of requests: whose they are, what they hold, and that they hurt nobody."""

import json
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from otlp_receiver import receiving
from router_code import ROUTER
from support.serving.routers import src

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
VARIANT = SimpleNamespace(name="nac-b0500-fp32", budget=0.5)
PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000003e8000007d0")  # 1000 by 2000 pixels


class Request:
    """A request as the server hands it on, and its sender."""

    def __init__(self, parameters=None, identity="me/1", sends=True):
        self.parameters = lambda: json.dumps(parameters or {})
        self.request_id = lambda: identity
        self.responses, self._sends = [], sends

    def send(self, response, flags):
        if not self._sends:
            raise OSError("the caller has gone")
        self.responses.append(response)

    def is_cancelled(self):
        return False


@pytest.fixture
def traced(pb, monkeypatch):
    """The router's instrumentation before a receiver; `sent` ends it and gives what came."""
    pytest.importorskip("opentelemetry.sdk", reason="not installed: pip install '.[trace]'")
    with receiving() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.endpoint)
        made = src.instrumentation.Instrumentation("nac", unwatched="saccade_probe")
        made.receiver = receiver

        def sent():
            made.close()
            return receiver.spans

        made.sent = sent
        yield made
        made.close()


def sender_of(instrumentation, request):
    """A request that is its own sender, observed."""
    return instrumentation.sender(request, request)


def ticket_of(sender):
    return src.backlog.Ticket("main", {}, 3, {}, (), sender, None, time.monotonic())


def answer(pb, instrumentation, *requests):
    """All that the router does with a group of requests."""
    tickets = [ticket_of(sender_of(instrumentation, request)) for request in requests]
    for ticket in tickets:
        instrumentation.routed(ticket, VARIANT)
    instrumentation.taken(tickets)
    for ticket in tickets:
        sizes = [src.decoding.megapixels(file) for file in (PNG, b"no image")]
        instrumentation.decoded(ticket, time.monotonic(), sizes)
    pb.answer = lambda asked: instrumentation.__dict__.setdefault("asked", asked) and {}
    with instrumentation.calls_for(tickets):
        src.calls.call(VARIANT.name, {"image": [0] * 6}, [], 0)
    for ticket in tickets:
        ticket.sender.send(pb.InferenceResponse(), flags=1)


def test_a_request_is_a_tree_of_spans_below_its_callers(pb, traced):
    before_ns = time.time_ns()
    answer(pb, traced, Request({"traceparent": SAMPLED, "budget": "0.5"}))
    after_ns = time.time_ns()
    spans = {span.name: span for span in traced.sent()}
    root = spans.pop("saccade.request")
    assert (root.trace, root.parent) == (TRACE, PARENT)
    assert root.attributes == {
        "saccade.model": "nac", "saccade.request_id": "me/1", "saccade.variant": VARIANT.name,
        "saccade.budget": 0.5, "saccade.component": "main", "saccade.rows": 3,
    }  # fmt: skip
    assert not root.failed
    assert list(spans) == ["wait", "decode", "call", "answer"]
    assert before_ns - 1e6 <= root.start_ns and root.end_ns <= after_ns + 1e6
    for span in spans.values():
        assert (span.trace, span.parent) == (TRACE, root.id)
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns
    starts = [span.start_ns for span in spans.values()]
    assert starts == sorted(starts)
    assert spans["decode"].attributes == {"saccade.images": 2, "saccade.megapixels": 2.0}
    assert spans["call"].attributes == {
        "saccade.model": VARIANT.name, "saccade.call.rows": 6, "saccade.call.requests": 1,
    }  # fmt: skip
    assert root.resource["service.name"] == "saccade"


def test_a_later_step_of_a_policy_waits_from_the_answer_before(pb, traced):
    ticket = ticket_of(sender_of(traced, Request({"traceparent": SAMPLED})))
    pb.answer = lambda asked: {}
    for _ in range(2):
        traced.taken([ticket])
        with traced.calls_for([ticket]):
            src.calls.call(VARIANT.name, {"image": [0] * 6}, [], 0)
    ticket.sender.send(pb.InferenceResponse(), flags=1)
    spans = traced.sent()
    first, second = [span for span in spans if span.name == "wait"]
    assert first.end_ns <= second.start_ns <= second.end_ns
    assert second.start_ns >= next(span for span in spans if span.name == "call").end_ns


def test_the_backend_runs_below_the_call_of_each_request(pb, traced):
    other = f"00-{'12' * 16}-{PARENT}-01"
    given = [
        {"Traceparent": SAMPLED},
        {"traceparent": f"00-{TRACE}-{PARENT}-00"},
        {"traceparent": other},
    ]
    answer(pb, traced, *map(Request, given))
    told = traced.asked["parameters"]
    backend = src.tracing.Clock()
    for span in traced.spans.run_spans("run", [told, {}], backend.ns(time.monotonic())):
        span.end()
    spans = traced.sent()
    calls = {span.trace: span for span in spans if span.name == "call"}
    runs = {span.trace: span for span in spans if span.name == "run"}
    assert set(calls) == set(runs) == {TRACE, "12" * 16}  # who is not sampled has no span
    for trace, run in runs.items():
        assert run.parent == calls[trace].id


@pytest.mark.parametrize(
    "context",
    ["", "junk", SAMPLED + "-" + "a" * 600, "00-" + "0" * 32 + f"-{PARENT}-01", "ff-" + SAMPLED[3:],
     SAMPLED.upper() + "é", "\x1b[31m", 7, True, None],
)  # fmt: skip
def test_a_context_that_is_none_is_ignored(context, pb, traced):
    answer(pb, traced, Request({"traceparent": context, "tracestate": "a=1"}))
    (root,) = [span for span in traced.sent() if span.name == "saccade.request"]
    assert root.parent == "" and root.trace != TRACE


@pytest.mark.parametrize(
    ("state", "kept"), [("a=1,b=2", "a=1,b=2"), (f"a={'1' * 200},b={'2' * 200},c={'3' * 200}", "")]
)
def test_a_state_is_followed_up_to_its_length(state, kept, pb, traced):
    answer(pb, traced, Request({"traceparent": SAMPLED, "tracestate": state}))
    (root,) = [span for span in traced.sent() if span.name == "saccade.request"]
    assert (root.parent, root.state) == (PARENT, kept)


def test_the_end_does_not_wait_for_a_receiver(pb, traced, monkeypatch):
    ended, done = threading.Event(), []
    monkeypatch.setattr(src.tracing, "CLOSE_S", 0.05)
    provider = SimpleNamespace(shutdown=lambda: done.append(ended.wait(10)))
    monkeypatch.setattr(traced.spans, "_provider", provider)
    traced.close()
    assert not done
    ended.set()


def test_the_librarys_own_log_is_a_line_a_minute(pb):
    handler = src.tracing.Warnings(pb.log.append)
    callers = logging.LogRecord("opentelemetry.trace.span", logging.ERROR, "f", 1, "x", (), None)
    handler.emit(callers)
    record = logging.LogRecord(
        "opentelemetry.sdk.x", logging.ERROR, "f", 1, "down\n%s", ("now",), None
    )
    for _ in range(3):
        handler.emit(record)
    assert pb.log == ["OpenTelemetry: down now"]


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "tracestate"])
def test_a_context_is_no_choice_of_a_variant(name, pb):
    assert src.choose.is_reserved(name)


def test_a_probe_is_no_request_of_a_caller(pb, traced):
    sender = sender_of(traced, Request({"saccade_probe": "lanes", "traceparent": SAMPLED}))
    sender.send(pb.InferenceResponse(), flags=1)
    traced.spans.run_spans("run", [{}, {"traceparent": "junk"}], 0)
    assert not traced.sent()


@pytest.mark.parametrize(
    ("name", "code"), [("INVALID_ARG", "INVALID_ARGUMENT"), ("UNAVAILABLE", "UNAVAILABLE")]
)
def test_a_refusal_has_its_code_and_none_of_its_words(name, code, pb, traced):
    identity = "x/\x1b]0;title\x07\n\u202e" + "y" * 999
    sender = sender_of(traced, Request({"traceparent": SAMPLED}, identity))
    error = pb.TritonError("unknown parameter 'secret'", getattr(pb.TritonError, name))
    sender.send(pb.InferenceResponse(error=error), flags=1)
    (span,) = traced.sent()
    assert span.failed == (code == "UNAVAILABLE")
    assert span.attributes["saccade.code"] == code
    shown = span.attributes["saccade.request_id"]
    assert shown.startswith("x/\\x1b]0;title\\x07\\n\\u202eyy") and len(shown) == 128
    assert "secret" not in repr(span)


def test_a_search_has_a_bounded_number_of_spans(pb, traced):
    module = src.instrumentation
    ticket = ticket_of(sender_of(traced, Request()))
    pb.answer = lambda asked: {}
    with traced.calls_for([ticket]):
        for _ in range(module.MOST_CALLS + 5):
            src.calls.call("step", {"image": [0]}, [], 0)
    ticket.sender.send(pb.InferenceResponse(), flags=1)
    spans = traced.sent()
    assert sum(span.name == "call" for span in spans) == module.MOST_CALLS
    (root,) = [span for span in spans if span.name == "saccade.request"]
    assert root.attributes["saccade.calls"] == module.MOST_CALLS + 5


def test_an_answer_that_is_lost_ends_with_the_error_that_follows(pb, traced):
    request = Request(sends=False)
    sender = sender_of(traced, request)
    with pytest.raises(OSError):
        sender.send(pb.InferenceResponse(), flags=1)
    request._sends = True
    sender.send(pb.InferenceResponse(error=pb.TritonError("lost")), flags=1)
    (span,) = traced.sent()
    assert span.attributes["saccade.code"] == "INTERNAL"


def test_a_receiver_that_is_down_or_slow_costs_no_request(pb, traced, monkeypatch):
    tracing = src.tracing
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)
    traced.receiver.delay_s = 3600
    requests = [Request() for _ in range(600)]
    for request in requests:  # more spans than the queue holds
        answer(pb, traced, request)
    traced.close()  # for a time that is bounded
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    down = src.instrumentation.Instrumentation("nac")
    answer(pb, down, *requests)
    down.close()
    assert all(len(request.responses) == 2 for request in requests)
    # One line of each process, not one of each attempt.
    assert len([line for line in pb.log if "OpenTelemetry" in line]) <= 2


def test_an_answer_without_end_is_not_read(pb, traced, monkeypatch):
    traced.receiver.body_mib = 64  # without a length, so that it could go on
    answer(pb, traced, Request())
    assert traced.sent()
    assert traced.receiver.body_sent < 2**24  # what the sockets between them hold
    # A session with the user's credentials stays as it is.
    named = {"OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER": "mine"}
    assert src.tracing.unread_session(named) is None


def test_trouble_of_its_own_is_no_requests(pb, traced):
    request = Request()
    request.parameters = lambda: "{"
    answer(pb, traced, request)
    assert len(request.responses) == 1
    assert "could not be observed" in pb.log[0]


OFF = """
import sys, types
pb = types.ModuleType("triton_python_backend_utils")
pb.Logger = types.SimpleNamespace(log_warn=print)
sys.modules[pb.__name__] = pb
sys.path.insert(0, sys.argv[1])
from instrumentation import Instrumentation
from tracing import spans_of
watched = Instrumentation("nac", {})
assert watched.sender(None, "the sender") == "the sender" and spans_of("nac", {}, print) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_without_an_endpoint_nothing_is_imported_or_wrapped():
    subprocess.run([sys.executable, "-c", OFF, ROUTER], check=True)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://h:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        ({ENDPOINT: "http://h:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({ENDPOINT: "http://h:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://h:4318", "OTEL_TRACES_EXPORTER": "otlp,console"}, True),
        ({ENDPOINT: "http://h:4318", "SACCADE_REQUEST_LOG": "1"}, True),
    ],
)
def test_the_variables_of_the_specification_decide(environment, wanted, pb):
    assert src.tracing.wants_tracing(environment) == wanted


def test_what_cannot_be_sent_is_said_and_is_no_failure(pb):
    environment = {ENDPOINT: "http://h:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    made = src.instrumentation.Instrumentation("nac", environment)
    assert not made.on
    assert pb.log == ["no spans are sent: the protocol is 'grpc', expected http/protobuf"]


@pytest.fixture
def logged(pb):
    """Instrumentation with a log of requests alone."""
    return src.instrumentation.Instrumentation("nac", {"SACCADE_REQUEST_LOG": "1"})


def refused(pb, instrumentation, identity="me/1", text="too small"):
    ticket = ticket_of(sender_of(instrumentation, Request(identity=identity)))
    instrumentation.routed(ticket, VARIANT)
    instrumentation.taken([ticket])
    error = pb.TritonError(text, pb.TritonError.INVALID_ARG)
    ticket.sender.send(pb.InferenceResponse(error=error), flags=1)


def test_a_request_that_is_refused_leaves_a_line(pb, logged):
    answer(pb, logged, Request())
    assert pb.log == []  # who is answered leaves none
    refused(pb, logged, "me/\x1b[2J\r\nE1122 forged\u202e" + "z" * 9999, "no\x07\n" + "w" * 9999)
    (line,) = pb.log
    assert line.isascii() and line.isprintable() and len(line) < 1000
    content = json.loads(line.removeprefix("saccade-request "))
    assert content["request_id"].startswith("me/\\x1b[2J\\r\\nE1122 forged\\u202ezz")
    # A reason keeps its lines, which the reader of the log splits; each is escaped.
    assert content["reason"].startswith("no\\x07\nww")
    assert len(content["request_id"]) == 128 and len(content["reason"]) == 500
    assert (content["variant"], content["code"]) == (VARIANT.name, "INVALID_ARGUMENT")
    assert 0 < content["waited_s"] < 60 and 0 < content["run_s"] < 60


def test_a_flood_of_refusals_is_counted(pb, logged, monkeypatch):
    module = src.tracing
    monkeypatch.setattr(module, "LINES_A_SECOND", 0.0)
    for _ in range(150):
        refused(pb, logged)
    assert len(pb.log) == 100
    logged.log._lines = 1.0  # some time later
    refused(pb, logged)
    assert json.loads(pb.log[-1].removeprefix("saccade-request "))["left_out"] == 50
