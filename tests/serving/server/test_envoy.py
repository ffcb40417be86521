# SPDX-License-Identifier: Apache-2.0
"""Envoy before servers that remember what came, and before embedded ones of which one is killed."""

import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from envoys import Envoy, running

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.client.connection import is_queue_full
from saccade.serving.server.envoy import ProxyOptions, proxy, proxy_text
from saccade.serving.server.http_endpoint import JSON, HttpEndpoint
from saccade.serving.server.server import ServeOptions, Server

SERVICE = "/inference.GRPCInferenceService"
MIB = 2**20
IN_FLIGHT = 4  # of each of the two


class Upstream:
    """A server that does what the message asks for, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.metadata: list[dict[str, str]] = []
        self.left_s: list[float] = []
        self.release = threading.Event()
        self.is_ready = True
        self.stack = ExitStack()
        self.port = 0
        self.start()
        self.ready = HttpEndpoint("127.0.0.1", 0, "--ready-port", ("/ready",), self._readiness)
        self.stack.callback(self.ready.close)

    def start(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        self.server.add_generic_rpc_handlers((self,))
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def _readiness(self) -> tuple[int, str, bytes]:
        return 200 if self.is_ready else 503, JSON, b"{}"

    def service(self, details: Any) -> Any:
        """What gRPC asks a handler for."""

        def answer(message: bytes, context: Any) -> Iterator[bytes]:
            self.asked.append((details.method, message))
            self.metadata.append(dict(details.invocation_metadata))
            self.left_s.append(context.time_remaining() or 0.0)
            if message == b"begun":
                yield b"half"
            if message == b"wait":
                self.release.wait(60)
            if message in (b"busy", b"begun"):
                context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            if message in (b"stopping", b"unknown"):
                text = "Request for unknown model: 'm' "
                text += "has no available versions" if message == b"stopping" else "is not found"
                context.abort(grpc.StatusCode.NOT_FOUND, text)
            if message == b"wrong":
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "wrong")
            yield b"done"

        return grpc.unary_stream_rpc_method_handler(answer)

    def count(self, message: bytes) -> int:
        return sum(1 for _, seen in self.asked if seen == message)


@pytest.fixture(scope="module")
def both() -> Iterator[list[Upstream]]:
    made = [Upstream(), Upstream()]
    yield made
    for upstream in made:
        upstream.release.set()
        upstream.server.stop(0)
        upstream.stack.close()


@pytest.fixture
def upstreams(both) -> Iterator[list[Upstream]]:
    """The two, with nothing to remember."""
    for upstream in both:
        for memory in (upstream.asked, upstream.metadata, upstream.left_s):
            memory.clear()
        upstream.release.clear()
        upstream.is_ready = True
    yield both
    for upstream in both:
        upstream.release.set()


@contextmanager
def before(
    envoy_binary: str, folder: Path, upstreams: list[Upstream], **named: Any
) -> Iterator[Envoy]:
    servers = [f"127.0.0.1:{upstream.port}" for upstream in upstreams]
    ports = [upstream.ready.port for upstream in upstreams]
    options = {"in_flight": IN_FLIGHT, "max_message_mib": 1, "memory_mib": 64, **named}
    with running(envoy_binary, folder, servers, ports, **options) as envoy:
        yield envoy


@pytest.fixture(scope="module")
def shared(envoy_binary, both, tmp_path_factory) -> Iterator[Envoy]:
    with before(envoy_binary, tmp_path_factory.mktemp("envoy"), both) as started:
        yield started


@pytest.fixture
def envoy(shared, upstreams, eventually) -> Envoy:
    """The proxy before the two, both of which are asked."""
    eventually(lambda: shared.ready_servers() == 2, 3)
    return shared


@contextmanager
def calls(envoy: Envoy, method: str = "ModelInfer") -> Iterator[Callable[..., Any]]:
    """`call(message)`: the answer, or the status that it ended with."""
    with grpc.insecure_channel(envoy.url) as channel:
        sent = channel.unary_unary(f"{SERVICE}/{method}")

        def call(message: bytes = b"", **named: Any) -> Any:
            try:
                return sent(message, **{"timeout": 60, **named})
            except grpc.RpcError as error:
                return error.code().name

        yield call


def test_the_written_file_is_valid(envoy_binary, tmp_path):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    (tmp_path / "tls").mkdir()
    keys = ["-keyout", tmp_path / "tls/tls.key", "-out", tmp_path / "tls/tls.crt"]
    subprocess.run([*command, *keys], check=True, capture_output=True)
    for name, servers, options in (
        ("one", ["localhost:8001"], {}),
        ("two", ["10.0.0.1:8001", "10.0.0.2:8001"], {"admin": tmp_path / "a's \"socket"}),
        ("tls", ["servers:8001"], {"tls": tmp_path / "tls", "listen": "0.0.0.0:8443"}),
    ):
        written = proxy(servers, ProxyOptions(tmp_path / f"{name}.yaml", **options))
        done = subprocess.run(
            [envoy_binary, "--mode", "validate", "-c", written.file, "-l", "warn"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "OK" in done.stdout, done.stderr


def test_only_what_callers_need_passes(envoy, upstreams):
    for method in ("ModelInfer", "ModelReady", "ServerReady", "ModelConfig", "ModelMetadata"):
        with calls(envoy, method) as call:
            assert call(b"x") == b"done"
    passed = sum(len(upstream.asked) for upstream in upstreams)
    for method in (
        "RepositoryModelUnload", "RepositoryIndex", "SystemSharedMemoryRegister", "LogSettings",
        "CudaSharedMemoryStatus", "TraceSetting", "ModelStatistics", "ModelStreamInfer",
        "ModelInfer/x", "../GRPCInferenceService/RepositoryIndex", "ModelInfer%2f", "",
    ):  # fmt: skip
        with calls(envoy, method) as call:
            assert call(b"x") in ("UNIMPLEMENTED", "INTERNAL"), method
    with calls(envoy) as call:
        assert call(b"x", compression=grpc.Compression.Gzip) == "UNIMPLEMENTED"
    assert sum(len(upstream.asked) for upstream in upstreams) == passed


def test_the_callers_name_for_a_request_arrives(envoy, upstreams):
    with calls(envoy) as call:
        call(b"x", metadata=[("x-request-id", "mine-7"), ("x-saccade-admin", "no")])
        call(b"x")
    one, other = (each for upstream in upstreams for each in upstream.metadata)
    names = {one["x-request-id"], other["x-request-id"]}
    assert "mine-7" in names and all(names)
    assert not any("x-saccade-admin" in each for each in (one, other))


def test_a_message_over_the_cap_is_refused_and_harms_nobody(envoy, upstreams):
    with calls(envoy) as call, ThreadPoolExecutor() as pool:
        waiting = pool.submit(call, b"wait")
        assert call(b"x" * (2 * MIB)) == "RESOURCE_EXHAUSTED"
        assert call(b"x" * (MIB // 2)) == b"done"
        for upstream in upstreams:
            upstream.release.set()
        assert waiting.result(60) == b"done"


def test_a_callers_deadline_is_kept(envoy, upstreams):
    began = time.monotonic()
    with calls(envoy) as call:
        # As a header, so that the library on this side does not end the call itself.
        deadline = [("grpc-timeout", "300m")]
        assert call(b"wait", timeout=None, metadata=deadline) == "DEADLINE_EXCEEDED"
    assert time.monotonic() - began >= 0.29
    (left_s,) = (left for upstream in upstreams for left in upstream.left_s)
    assert 0 < left_s <= 0.3


def test_who_sets_no_deadline_does_not_wait_for_ever(envoy_binary, upstreams, tmp_path):
    with before(envoy_binary, tmp_path, upstreams[:1], longest_s=1) as envoy, calls(envoy) as call:
        assert call(b"wait", timeout=None) == "DEADLINE_EXCEEDED"


def test_what_is_beyond_the_limit_is_refused_at_once(envoy, upstreams, eventually):
    with calls(envoy) as call, ThreadPoolExecutor(2 * IN_FLIGHT) as pool:
        waiting = [pool.submit(call, b"wait") for _ in range(2 * IN_FLIGHT)]
        arrived = [len(upstream.asked) for upstream in upstreams]
        eventually(lambda: sum(upstream.count(b"wait") for upstream in upstreams) == 8, 2)
        assert not any(future.done() for future in waiting), arrived
        assert call(b"one too many") == "UNAVAILABLE"
        assert not any(upstream.count(b"one too many") for upstream in upstreams)
        for upstream in upstreams:
            upstream.release.set()
        assert {future.result(60) for future in waiting} == {b"done"}
        assert call(b"x") == b"done"


def test_the_client_knows_that_refusal(envoy_binary, upstreams, tmp_path, eventually):
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with before(envoy_binary, tmp_path, upstreams[:1], in_flight=1) as envoy:
        with calls(envoy) as call, ThreadPoolExecutor() as pool:
            waiting = pool.submit(call, b"wait")
            eventually(lambda: upstreams[0].asked, 2)
            with InferenceServerClient(envoy.url) as client:
                with pytest.raises(InferenceServerException) as refused:
                    client.is_server_ready()
            assert is_queue_full(refused.value)
            upstreams[0].release.set()
            waiting.result(60)


def test_unavailable_is_asked_of_the_other_server_and_nothing_else_is(envoy, upstreams):
    with calls(envoy) as call:
        assert call(b"busy") == "UNAVAILABLE"
        assert [upstream.count(b"busy") for upstream in upstreams] in ([2, 1], [1, 2])
        assert call(b"wrong") == "INVALID_ARGUMENT"
        assert sum(upstream.count(b"wrong") for upstream in upstreams) == 1
        assert call(b"unknown") == "NOT_FOUND"
        assert sum(upstream.count(b"unknown") for upstream in upstreams) == 1
        assert call(b"stopping") == "NOT_FOUND"
        assert all(upstream.count(b"stopping") for upstream in upstreams)
        assert call(b"begun") == "UNAVAILABLE"
        assert sum(upstream.count(b"begun") for upstream in upstreams) == 1


def test_a_busy_server_is_not_taken_for_a_dead_one(envoy, upstreams):
    with calls(envoy) as call:
        for _ in range(20):
            assert call(b"busy") == "UNAVAILABLE"
        assert envoy.ready_servers() == 2
        for _ in range(20):
            assert call(b"x") == b"done"
    assert all(upstream.count(b"x") for upstream in upstreams)


def test_a_server_that_is_gone_costs_nobody_a_request(envoy, upstreams, eventually):
    first, second = upstreams
    with calls(envoy) as call:
        assert {call(b"x") for _ in range(10)} == {b"done"} and first.asked and second.asked
        first.server.stop(0).wait()
        assert {call(b"x") for _ in range(30)} == {b"done"}
        first.start()
        asked = len(first.asked)
        eventually(lambda: call(b"x") == b"done" and len(first.asked) > asked, 10)


def test_who_is_not_ready_is_not_asked(envoy, upstreams, eventually):
    first, second = upstreams
    eventually(lambda: envoy.ready_servers() == 2, 2)
    first.is_ready = False
    eventually(lambda: envoy.ready_servers() == 1, 2)
    with calls(envoy) as call:
        asked = len(first.asked)
        assert {call(b"x") for _ in range(10)} == {b"done"}
        assert len(first.asked) == asked
        # Perhaps one variant of each is dead: those that live answer.
        second.is_ready = False
        eventually(lambda: envoy.ready_servers() == 0, 2)
        assert {call(b"x") for _ in range(10)} == {b"done"}
        first.is_ready = True
        eventually(lambda: envoy.ready_servers() == 1, 2)
        asked = len(second.asked)
        assert {call(b"x") for _ in range(10)} == {b"done"} and len(second.asked) == asked


def test_a_lone_server_that_is_busy_is_asked_once(envoy_binary, upstreams, tmp_path):
    with before(envoy_binary, tmp_path, upstreams[:1]) as envoy, calls(envoy) as call:
        assert call(b"busy") == "UNAVAILABLE" and upstreams[0].count(b"busy") == 1


def test_the_documents_way_to_end_lets_answers_pass(envoy_binary, upstreams, tmp_path, eventually):
    with before(envoy_binary, tmp_path, upstreams) as envoy:
        end_gracefully(envoy, upstreams, eventually)
    assert "admin:" not in proxy_text(["a:1"], ProxyOptions(Path("x")))


def end_gracefully(envoy: Envoy, upstreams: list[Upstream], eventually: Any) -> None:
    assert stat.S_IMODE(envoy.admin.stat().st_mode) == 0o600
    with calls(envoy) as call, ThreadPoolExecutor() as pool:
        waiting = pool.submit(call, b"wait")
        eventually(lambda: any(upstream.asked for upstream in upstreams), 2)
        envoy.ask("/drain_listeners?graceful", "POST")
        eventually(lambda: not listens(envoy.port), 3)
        assert not waiting.done()
        for upstream in upstreams:
            upstream.release.set()
        assert waiting.result(60) == b"done"
    envoy.ask("/quitquitquit", "POST")
    assert envoy.process.wait(60) == 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("servers", "options", "said"),
    [
        ([], {}, "Found no server"),
        (["a"], {}, "HOST:PORT"),
        (["a:0"], {}, "not a port"),
        (["a:1 }"], {}, "not a port"),
        (["a}:1"], {}, "not an address"),
        (["a:1", "a:1"], {}, "found a server twice"),
        (["a:1", "b:1"], {"ready_port": (1, 2, 3)}, "3 values for 2 servers"),
        (["a:1"], {"ready_port": (70000,)}, "70000"),
        (["a:1"], {"listen": "0.0.0.0:1"}, "--tls"),
        (["a:1"], {"listen": "8443"}, "--listen"),
        (["a:1"], {"tls": Path("nowhere")}, "no tls.crt and no tls.key"),
        (["a:1"], {"in_flight": 0}, "--in-flight: found 0"),
        (["a:1"], {"memory_mib": 100}, "at least 128"),
        (["a:1"], {"ready_path": "ready"}, "--ready-path"),
        (["a:1"], {"ready_path": "/a b"}, "--ready-path"),
        (["a:1"], {"admin": Path("x" * 200)}, "shorter"),
    ],
)
def test_what_cannot_be_meant_is_refused(servers, options, said, tmp_path):
    with pytest.raises(SaccadeError, match=said):
        proxy(servers, ProxyOptions(tmp_path / "envoy.yaml", **options))
    assert not list(tmp_path.iterdir())


def test_a_file_that_stands_there_stays(tmp_path):
    (tmp_path / "envoy.yaml").write_text("mine")
    with pytest.raises(SaccadeError, match="--force"):
        proxy(["a:1"], ProxyOptions(tmp_path / "envoy.yaml"))
    assert (tmp_path / "envoy.yaml").read_text() == "mine"
    proxy(["a:1"], ProxyOptions(tmp_path / "envoy.yaml", force=True))
    assert "a, port_value: 1" in (tmp_path / "envoy.yaml").read_text()


FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.mark.journey
def test_callers_do_not_notice_that_a_server_is_killed(
    envoy_binary, server, tiny_repository, digit, tmp_path, eventually
):
    stop, seen = threading.Event(), Counter()

    def caller() -> None:
        with Client(envoy.url, server.model, timeout_s=30) as client:
            while not stop.is_set():
                try:
                    (answer,) = client.classify([digit], budget=0.5)
                    seen[answer.variant] += 1
                except SaccadeError as error:
                    seen[str(error)] += 1

    with Server(tiny_repository, ServeOptions(**FREE_PORTS)) as second:
        servers = [server.url, second.url]
        ready = [each.options.ready_port for each in (server, second)]
        with running(envoy_binary, tmp_path, servers, ready) as envoy:
            with Client(envoy.url, server.model) as through, Client(server.url, "nac") as direct:
                asked = {"image": [digit]}
                np.testing.assert_array_equal(
                    through.infer(asked, budget=0.5)["logits"],
                    direct.infer(asked, budget=0.5)["logits"],
                )
            eventually(lambda: envoy.ready_servers() == 2, 5)
            callers = [threading.Thread(target=caller) for _ in range(4)]
            for thread in callers:
                thread.start()
            eventually(lambda: sum(seen.values()) > 20, 2)
            os.kill(second.pid, signal.SIGKILL)
            eventually(lambda: envoy.ready_servers() == 1, 5)
            eventually(lambda: envoy.ready_servers() == 2, 20)
            before = envoy.requests_to(second.url)
            eventually(lambda: envoy.requests_to(second.url) > before + 20, 5)
            stop.set()
            for thread in callers:
                thread.join(60)
    assert list(seen) == ["nac-b0500-fp32"], seen
