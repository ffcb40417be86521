# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` that is followed: requests by their traces, and all of it by a log of JSON."""

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from otlp_receiver import receiving

from saccade.serving.client.client import Client

PARENT = "b7ad6b7169203331"
FREE = [word for port in ("grpc", "http", "metrics", "ready") for word in (f"--{port}-port", "0")]
LONG_S = 300


class Service:
    """The command, and the objects that it has written to standard error so far."""

    def __init__(self, repository, environment):
        words = [sys.executable, "-m", "saccade", "serve", str(repository), *FREE, "--http"]
        self.process = subprocess.Popen(
            [*words, "--log-format", "json"], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def events(self, kind=None):
        every = [json.loads(line) for line in list(self.lines)]
        return [content for content in every if kind in (None, content.get("event"))]


@pytest.fixture(scope="module")
def receiver():
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def service(needs_server, small_repository, receiver):
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    made = Service(small_repository, environment)
    try:
        while not made.events("serving"):
            assert made.process.poll() is None, made.lines
            threading.Event().wait(0.05)
        (serving,) = made.events("serving")
        made.url, made.http = serving["grpc"], serving["http"].removeprefix("http://")
        yield made
    finally:
        made.process.send_signal(signal.SIGINT)
        made.process.wait(LONG_S)


def plain_call(service, identity="", headers=None, data=b"junk", http=False):
    """A call by NVIDIA's own client, which knows nothing of traces."""
    import tritonclient.grpc
    import tritonclient.http

    kind = tritonclient.http if http else tritonclient.grpc
    image = kind.InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[data]], dtype=object))
    with kind.InferenceServerClient(service.http if http else service.url) as client:
        return client.infer("tiny", [image], request_id=identity, headers=headers)


def test_a_trace_goes_from_the_caller_through_router_and_backend(
    service, receiver, eventually, digit
):
    trace = pytest.importorskip("opentelemetry.trace", reason="pip install '.[trace]'")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    tracer = sdk.TracerProvider().get_tracer("application")
    with Client(service.url, "tiny") as client:
        client.classify([digit])  # the first call loads what is loaded late
        with tracer.start_as_current_span("parent") as parent:
            client.classify([digit] * 3, budget=0.5)
    identity = f"{parent.get_span_context().trace_id:032x}"
    eventually(lambda: {"saccade.request", "run"} <= set(receiver.of(identity)), 5)
    spans = {name: found for name, (found,) in receiver.of(identity).items()}
    root, call = spans.pop("saccade.request"), spans["call"]
    assert root.parent == f"{parent.get_span_context().span_id:016x}"
    assert parent.start_time <= root.start_ns and root.end_ns <= parent.end_time
    assert set(spans) == {"wait", "decode", "call", "answer", "run"}
    for span in spans.values():
        above = call if span.name == "run" else root
        assert span.parent == above.id
        assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns
    assert root.attributes["saccade.variant"] == call.attributes["saccade.model"]
    assert root.attributes["saccade.budget"] == 0.5 and root.attributes["saccade.rows"] == 3
    assert spans["decode"].attributes["saccade.images"] == 3
    assert spans["run"].resource["saccade.model"] == call.attributes["saccade.model"]
    assert trace.get_current_span().get_span_context().is_valid is False


def test_callers_with_a_client_of_their_own_are_followed(service, receiver, eventually):
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[trace]'")
    for number, http in ((1, False), (2, True)):
        for flag in ("01", "00"):
            identity = f"{number}{flag}" + "a" * 29
            headers = {"Traceparent" if http else "traceparent": f"00-{identity}-{PARENT}-{flag}"}
            with pytest.raises(Exception, match="JPEG, PNG or WebP"):
                plain_call(service, headers=headers, http=http)
    for number in (1, 2):
        identity = f"{number}01" + "a" * 29
        eventually(lambda identity=identity: "saccade.request" in receiver.of(identity), 5)
        (root,) = receiver.of(identity)["saccade.request"]
        assert root.parent == PARENT and root.attributes["saccade.code"] == "INVALID_ARG"
    assert not [span for span in receiver.spans if span.trace[1:3] == "00"]  # not sampled


def test_a_receiver_that_refuses_changes_no_answer(service, receiver, digit):
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[trace]'")
    with Client(service.url, "tiny") as client:
        before = client.classify([digit])
        receiver.status = 503
        try:
            headers = {"traceparent": "junk", "tracestate": "=" * 600}
            with pytest.raises(Exception, match="JPEG, PNG or WebP"):
                plain_call(service, headers=headers)
            assert client.classify([digit]) == before
        finally:
            receiver.status = 200


def test_a_hostile_request_is_one_line_of_json(service, eventually):
    identity = 'me/\x1b]0;title\x07\n{"level": "error"}\u202e"' + "x" * 999
    with pytest.raises(Exception, match="JPEG, PNG or WebP"):
        plain_call(service, identity)

    def found():
        lines = service.events("request_failed")
        return [one for one in lines if one["request_id"].startswith("me/")]

    eventually(found, 5)
    (content,) = found()
    assert content["request_id"].startswith('me/\\x1b]0;title\\x07\\n{"level": "error"}\\u202e"xx')
    assert len(content["request_id"]) == 128
    assert (content["model"], content["variant"]) == ("tiny", "tiny-b1000-fp32")
    assert content["code"] == "INVALID_ARG" and "not a supported image" in content["reason"]
    assert content["waited_s"] > 0 and content["run_s"] > 0
    assert all(line.rstrip("\n").isprintable() and line.isascii() for line in service.lines)


def test_the_servers_lines_have_the_same_shape(service):
    shape = {"time", "level", "logger", "message"}
    assert all(shape <= set(content) for content in service.events())
    assert any("GRPCInferenceService" in c["message"] for c in service.events())
    (serving,) = service.events("serving")
    assert serving["model"] == "tiny" and len(serving["variants"]) == 2
    assert not any("saccade-request" in content["message"] for content in service.events())


def test_the_end_loses_no_span_and_is_said(service, receiver):
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[trace]'")
    identity = "e" * 32
    with pytest.raises(Exception, match="JPEG, PNG or WebP"):
        plain_call(service, headers={"traceparent": f"00-{identity}-{PARENT}-01"})
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(LONG_S) == 0
    assert receiver.of(identity)
    service.reader.join(LONG_S)
    assert service.events()[-1]["event"] == "stopped"
