# SPDX-License-Identifier: Apache-2.0
"""Calls over TLS and with a context, what a failed one is explained as, and whether to retry."""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.models import image_decoding
from saccade.serving.client import client as client_module
from saccade.serving.client.client import AsyncClient, Client, Session
from saccade.serving.client.connection import ServerRefusedImage, explain
from saccade.serving.client.wire import Call, with_deadline

URL = "127.0.0.1:9"
_FAILED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9: "
# Of each failure: its status, the words of gRPC or the server, whether to retry, and our words.
FAILURES = {
    "no server": ("UNAVAILABLE", f"{_FAILED}Connection refused", True, "try again in a few sec"),
    "a silent server": ("DEADLINE_EXCEEDED", "Deadline Exceeded", True, "Try again in a few sec"),
    "no such host": ("UNAVAILABLE", "DNS resolution failed for x", False, "no such host"),
    "the port of /ready": (
        "UNAVAILABLE", f"{_FAILED}Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
        "frame, got frame type 79)", False, "does not speak gRPC. Pass the gRPC port",
    ),
    "TLS to a plain port": (
        "UNAVAILABLE", f"{_FAILED}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL",
        False, "the TLS handshake failed: the server may not use TLS",
    ),
    "a dead variant": (
        "UNAVAILABLE", "variant 'm-b1000-fp32' has died", True, "The other variants still answer"
    ),
    "a dead router": (
        "INTERNAL", "Stub process 'm_0_0' is not healthy.", True,
        "the router of m has died. `saccade serve` reloads it; until then no variant answers",
    ),
    "a stopping server": ("NOT_FOUND", "no available versions", True, "is stopping"),
    "a full queue": ("UNAVAILABLE", "Exceeds maximum queue size", True, "overloaded"),
    "no variant in time": (
        "UNAVAILABLE", "model 'm' is busy: found no way to answer this request within 0.5 ms; the "
        "cheapest, 'auto', needs about 39 ms; send less in one request, or allow more time", True,
        "m is overloaded: model 'm' is busy: found no way to answer this request within 0.5 ms; "
        "the cheapest, 'auto', needs about 39 ms; send less in one request, or allow more time.",
    ),
    "another reason": (
        "UNAVAILABLE", "not yet", True, "m accepts no requests now: not yet. Try again later.",
    ),
    "a fault": ("INTERNAL", "onnx runtime error", True, "m failed"),
    "an unknown fault": ("UNKNOWN", "what", False, "m failed"),
}  # fmt: skip


def failure(status, said):
    return explain(InferenceServerException(said, f"StatusCode.{status}"), URL, "m", 10)


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_says_whether_to_try_again(case):
    status, said, retry, words = FAILURES[case]
    error = failure(status, said)
    assert isinstance(error, ServerFailed) and words in str(error)
    assert (error.retry, error.status) == (retry, status)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.retry, copy.status, str(copy)) == (retry, status, str(error))


def test_a_dead_router_leaves_no_other_variants():
    assert "other variants" not in str(failure("INTERNAL", "Stub process 'm_0_0' is not healthy."))


def test_a_failed_start_is_not_worth_another_try():
    error = ServerFailed("It exited.")
    assert (error.retry, error.status) == (False, "")


def test_a_table_of_variants_keeps_its_lines():
    said = "[request id: 1] no variant has a score of 0.99. Variants:\na: score 0.9\nb:  score 0.8"
    assert str(failure("INVALID_ARGUMENT", said)).endswith("Variants:\na: score 0.9\nb: score 0.8")


@pytest.mark.parametrize("data", [b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_the_decoder_s_words_are_those_of_a_refused_image(data):
    with pytest.raises(image_decoding.ImageRefused) as reason:
        image_decoding._open(data, None)
    error = failure("INVALID_ARGUMENT", f"image 3: {reason.value}")
    assert isinstance(error, ServerRefusedImage)
    assert (error.index, error.reason) == (3, str(reason.value))


class Absent:
    """A connection to a server that has no model `digitsum`."""

    def get_model_config(self, name, client_timeout):
        said = f"Request for unknown model: '{name}' is not found"
        raise InferenceServerException(said, "StatusCode.NOT_FOUND")

    def close(self):
        pass


class AbsentAsyncio(Absent):
    async def get_model_config(self, name, client_timeout):
        super().get_model_config(name, client_timeout)

    async def close(self):
        pass


async def _view(client):
    client._connection = AbsentAsyncio()
    async with client:
        await client.view()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("routers", [("digits-sum", "other"), None])
def test_an_unknown_model_is_told_with_those_that_there_are(kind, routers, monkeypatch):
    def routers_at(url, timeout_s):
        if routers is None:
            raise SaccadeError("It does not tell.")
        return routers

    monkeypatch.setattr(client_module, "routers_at", routers_at)
    with pytest.raises(SaccadeError, match="there is no model 'digitsum'") as error:
        if kind == "asyncio":
            asyncio.run(_view(AsyncClient(URL, "digitsum")))
        else:
            client = Client(URL, "digitsum")
            client._connection = Absent()
            client.view()
    has = "This server has: digits-sum, other." if routers else f"`saccade doctor --url {URL}` "
    assert has in str(error.value) and "unknown model" not in str(error.value)


ASK = """
import asyncio, sys
from saccade.serving.client.connection import connect, connect_asyncio
async def ask():
    async with connect_asyncio(sys.argv[1]) as connection:
        return await connection.is_server_live()
with connect(sys.argv[1]) as connection:
    print(connection.is_server_live(), asyncio.run(ask()))
"""


class Lives(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    """A port of a server that speaks TLS only, and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"),
        *("subjectAltName=DNS:localhost", "-keyout", folder / "key", "-out", folder / "crt"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed, with which the certificate is made")
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Lives(), server)
    pair = ((folder / "key").read_bytes(), (folder / "crt").read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port, folder / "crt"
    stopped: threading.Event = server.stop(0)
    stopped.wait(5)


# The authorities that gRPC trusts are read once a process: each case is a process of its own.
@pytest.mark.parametrize(
    "scheme, trusted, answered",
    [("grpcs://", True, True), ("grpcs://", False, False), ("", True, False)],
)
def test_the_certificate_has_to_be_trusted(over_tls, scheme, trusted, answered):
    port, certificate = over_tls
    own = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)} if trusted else {}
    done = subprocess.run(
        [sys.executable, "-c", ASK, f"{scheme}localhost:{port}"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip() == "True True") == answered, done.stderr


def test_the_command_line_explains_a_failed_handshake_without_grpc_s_log(over_tls):
    own = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    command = [
        sys.executable,
        "-m",
        "saccade",
        "doctor",
        "--url",
        f"grpcs://localhost:{over_tls[0]}",
    ]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    assert done.returncode == 3 and "the TLS handshake failed: the server may not use TLS" in said
    assert "ssl_transport_security" not in done.stderr


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
