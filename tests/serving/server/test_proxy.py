# SPDX-License-Identifier: Apache-2.0
"""The committed proxy before the embedded server: TLS, a cap on messages, a list of what passes."""

import http.client
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from proxies import COMMITTED, DOCUMENT, ROOT, Proxy, nginx_or_skip, running
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from saccade.serving.client import client as client_module
from saccade.serving.client.client import Client

MIB = 2**20
INFER = "/v2/models/nac/infer"


@pytest.fixture(scope="module")
def nginx() -> str:
    """Asked for before a server is started for nothing."""
    return nginx_or_skip()


@pytest.fixture(scope="module")
def proxy(nginx, server) -> Iterator[Proxy]:
    with running(server.options.grpc_port, server.options.http_port) as started:
        yield started


@pytest.fixture
def through(proxy, server, monkeypatch) -> Iterator[Client]:
    """The client as it is, over TLS."""
    monkeypatch.setattr(client_module, "connect", lambda url: proxy.grpc())
    with Client(proxy.url, server.model) as connected:
        yield connected


def ask(connection: InferenceServerClient, payload: bytes, **named: Any) -> Any:
    tensor = InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[payload]], dtype=np.object_))
    return connection.infer("nac", [tensor], **named)


def status_of(call: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as error:
        call()
    return str(error.value.status()).removeprefix("StatusCode.")


def test_the_client_is_answered_over_tls(through, client, digit):
    assert through.classify([digit, digit], top=2) == client.classify([digit, digit], top=2)
    np.testing.assert_array_equal(
        through.infer({"image": [digit]}, budget=0.5)["logits"],
        client.infer({"image": [digit]}, budget=0.5)["logits"],
    )


def test_the_documents_client_is_answered(proxy, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for shown, here in (
        ("localhost:8443", f"localhost:{proxy.port}"),
        ("build/tls/tls.crt", str(proxy.certificate)),
        ("docs/examples/sum.png", str(ROOT / "docs/examples/sum.png")),
    ):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    exec(compile(code, str(DOCUMENT), "exec"), {})
    assert "nac-b0250-fp32" in capsys.readouterr().out


def test_the_documents_command_is_answered(proxy):
    (line,) = re.findall(r"^saccade (classify .*)$", DOCUMENT.read_text(), re.MULTILINE)
    words = shlex.split(line.replace(":8443", f":{proxy.port}"))
    done = subprocess.run(
        [sys.executable, "-m", "saccade", *words],
        cwd=ROOT,
        env={**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(proxy.certificate)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "nac-b0250-fp32" in done.stdout, done.stderr


def handshake(proxy: Proxy, context: ssl.SSLContext) -> str | None:
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
            return wrapped.version()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_only_tls_of_today_is_spoken(proxy):
    context = ssl.create_default_context(cafile=proxy.certificate)
    assert handshake(proxy, context) == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(proxy, context) == "TLSv1.2"
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        handshake(proxy, context)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(proxy, ssl.create_default_context())
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 400


def test_a_message_over_the_cap_is_refused_and_the_server_lives(proxy, server, through, digit):
    pid = server.pid
    over, under = b"x" * (3 * MIB), b"x" * (MIB // 2)
    with proxy.grpc() as connection, InferenceServerClient(server.url) as direct:
        assert status_of(lambda: ask(connection, over)) == "RESOURCE_EXHAUSTED"
        # Without the proxy, or under its cap, it is the router that says that this is no image.
        assert status_of(lambda: ask(direct, over)) == "INVALID_ARGUMENT"
        assert status_of(lambda: ask(connection, under)) == "INVALID_ARGUMENT"
    raw = {"inference_header_content_length": "0"}
    status, said = proxy.http("POST", INFER, over, **raw)
    assert status == 413 and b"larger" in said
    assert proxy.http("POST", INFER, under, **raw)[0] in (400, 500)
    assert server.pid == pid and len(through.classify([digit])) == 1


def test_json_that_is_nested_too_deeply_does_not_reach_the_server(proxy, server):
    pid = server.pid
    for kilobytes, length in ((50, ""), (150, ""), (150, "150000"), (150, "+150000"), (150, "1e5")):
        named = {"inference_header_content_length": length} if length else {}
        assert proxy.http("POST", INFER, b"[" * 1000 * kilobytes, **named)[0] == 413
    assert proxy.http("POST", INFER, b"[" * 49_999)[0] in (400, 500)
    assert server.pid == pid and proxy.http("GET", "/v2")[0] == 200


def test_a_body_in_chunks_does_not_reach_the_server(proxy, server):
    pid = server.pid
    parts = [b"{", b" ", b"}"]
    chunked = {"transfer_encoding": "chunked"}
    assert proxy.http("POST", INFER, iter(parts), **chunked)[0] == 411
    assert proxy.http("GET", "/v2", iter(parts), **chunked)[0] == 411
    assert proxy.http("POST", INFER, b"".join(parts))[0] in (400, 500)
    assert proxy.http("GET", "/v2")[0] == 200
    assert server.pid == pid


def test_only_so_many_messages_are_taken_at_once(proxy, eventually):
    context = ssl.create_default_context(cafile=proxy.certificate)
    begun = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()
    with ExitStack() as stack:
        for _ in range(32):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), 5))
            stack.enter_context(context.wrap_socket(plain, server_hostname="localhost")).send(begun)
        eventually(lambda: proxy.http("GET", "/v2")[0] == 503, 5)
        with proxy.grpc() as connection:
            assert status_of(lambda: ask(connection, b"x")) == "UNAVAILABLE"
    eventually(lambda: proxy.http("GET", "/v2")[0] == 200, 5)


def test_what_is_packed_is_refused(proxy):
    with proxy.grpc() as connection:
        packed = status_of(lambda: ask(connection, b"x", compression_algorithm="gzip"))
        assert packed == "UNIMPLEMENTED"
    assert proxy.http("POST", INFER, b"x", content_encoding="gzip")[0] == 415
    assert proxy.http("POST", INFER, b"x", content_encoding="identity")[0] in (400, 500)


@pytest.mark.parametrize(
    "path",
    [
        "/metrics", "/v2/models/stats", "/v2/models/nac/stats", "/v2/models/nac/generate",
        "/v2/repository/index", "/v2/repository/models/nac/unload", "/v2/logging",
        "/v2/trace/setting", "/v2/models/nac/trace/setting", "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status", "/v2/models/nac/../../repository/index",
        "/v2/models/nac/%2e%2e/%2e%2e/repository/index", "/v2/models/stats/../nac/ready",
        "//v2", "/v2?x=1", "/",
    ],
)  # fmt: skip
def test_what_is_not_for_clients_does_not_pass(proxy, path):
    for method in ("GET", "POST"):
        assert proxy.http(method, path)[0] in (400, 404)


def test_what_clients_need_passes(proxy, server):
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/nac"):
        assert proxy.http("GET", path)[0] == 200
    for variant in server.variants:
        assert proxy.http("GET", f"/v2/models/{variant}/ready")[0] == 200
    assert proxy.http("GET", "/v2/models/nac/config")[0] == 200


def test_methods_for_administration_do_not_pass(proxy):
    with proxy.grpc() as connection:
        assert connection.is_server_ready() and connection.is_model_ready("nac")
        for call in (
            connection.get_model_repository_index,
            connection.get_system_shared_memory_status,
            connection.get_cuda_shared_memory_status,
            connection.get_log_settings,
            connection.get_trace_settings,
            connection.get_inference_statistics,
            lambda: connection.load_model("nac"),
        ):
            assert status_of(call) == "UNIMPLEMENTED"


def test_a_server_that_is_gone_is_unavailable():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        nobody = holder.getsockname()[1]
    with running(nobody, nobody) as lonely:
        with lonely.grpc() as connection:
            assert status_of(lambda: ask(connection, b"x")) == "UNAVAILABLE"
        assert lonely.http("GET", "/v2/health/ready")[0] == 502


def test_the_images_signal_lets_an_answer_in_flight_pass():
    name = re.search(r"^STOPSIGNAL (\w+)$", (COMMITTED / "Dockerfile").read_text(), re.MULTILINE)
    with socket.create_server(("127.0.0.1", 0)) as upstream, ThreadPoolExecutor() as pool:
        with running(*[upstream.getsockname()[1]] * 2) as ending:
            asked = pool.submit(ending.http, "GET", "/v2")
            behind, _ = upstream.accept()
            with behind:
                behind.recv(65536)
                ending.process.send_signal(signal.Signals[name[1]])
                time.sleep(0.2)  # in which SIGTERM would cut it
                behind.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            assert asked.result(10) == (200, b"ok")
            assert ending.process.wait(10) == 0
