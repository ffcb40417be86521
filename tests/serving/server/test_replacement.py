# SPDX-License-Identifier: Apache-2.0
"""A repository that is written anew while it is served: checked first, then moved to unnoticed."""

import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_artefacts as tiny

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client.client import Client
from saccade.serving.repository.description import read_repository
from saccade.serving.server import addresses
from saccade.serving.server import process as server_process
from saccade.serving.server import server as server_module
from saccade.serving.server.serve import HangUp
from saccade.serving.server.server import ServeOptions, Server
from saccade.serving.server.supervisor import foreign_listeners

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.fixture(scope="module")
def place(small_repository, tmp_path_factory):
    """A link to the repository of the moment."""
    link = tmp_path_factory.mktemp("served") / "now"
    link.symlink_to(small_repository)
    return link


@pytest.fixture(scope="module")
def served(needs_server, place):
    """A server of that link, whose connections live for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "CONNECTION_AGE_S", 1)
        with Server(place, ServeOptions(grace_s=60, **FREE_PORTS)) as running:
            yield running


def point(link: Path, repository: Path) -> None:
    """Let the link lead elsewhere, from one moment to the next."""
    new = link.with_name("next")
    new.symlink_to(repository)
    new.replace(link)


def logits(server: Server) -> np.ndarray:
    with Client(server.url, server.model) as client:
        image = np.full((4, 4, 1), 7, np.uint8)
        return client.infer({"image": [image]}, outputs=["logits"])["logits"]


def broken(folder: Path) -> Path:
    """A repository whose hashes fit and whose model is none."""
    repository = tiny.write_repository(folder)
    next(repository.glob("*/1/model.onnx")).write_bytes(b"no model")
    tiny.rehash(repository)
    return repository


@pytest.mark.journey
def test_an_update_that_fails_keeps_what_was_served(served, place, tmp_path, monkeypatch, load):
    before, pid, old = logits(served), served.pid, place.resolve()
    with load(served, 1.0, 0.5, timeout_s=5) as calls:
        point(place, broken(tmp_path))
        with pytest.raises(SaccadeError, match="not ready to serve") as error:
            served.reload()
        assert "tiny-b" in str(error.value)
        # Past the checks the new server has to load it, too, beside the old one.
        monkeypatch.setattr(server_module, "preflight", lambda _: SimpleNamespace(passed=True))
        with pytest.raises(ServerFailed, match="new server exited during its start"):
            served.reload()
    assert not any(calls[1.0].errors + calls[0.5].errors)
    assert (served.pid, served.replacements, served.restarts) == (pid, 0, 0)
    assert served.ready() and np.array_equal(logits(served), before)
    point(place, old)


@pytest.mark.journey
def test_an_update_is_served_without_one_failure(
    served, place, tmp_path, monkeypatch, load, eventually
):
    original = tiny.onnx_model
    monkeypatch.setattr(tiny, "onnx_model", lambda seed: original(seed + 7))
    point(place, tiny.write_repository(tmp_path))
    before, pid, metrics_url = logits(served), served.pid, served.metrics_url
    with load(served, 1.0, 0.5, timeout_s=5) as calls:
        eventually(lambda: calls[0.5].errors, 10)
        # A caller that never speaks has no age at which its connection is moved.
        idle = socket.create_connection(("127.0.0.1", served.options.grpc_port))
        shas = [served.ready().repository]
        served.reload()
        assert served.pid != pid and served.replacements == 1
        shas.append(served.ready().repository)
        assert len(set(shas)) == 2 and shas[1] == read_repository(place).sha256
        port, callers = served.options.grpc_port, []
        for _ in range(16):
            callers.append(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: addresses.connections(port, served.pid) >= len(callers), 10)
        for caller in callers:
            caller.close()
        time.sleep(1)
        assert Path(f"/proc/{pid}").exists()
        idle.close()
        # The old one ends when its last caller has gone over, and takes its files along.
        eventually(lambda: not Path(f"/proc/{pid}").exists(), 60)
        moved = len(calls[1.0].errors)
        eventually(lambda: len(calls[1.0].errors) > moved + 20, 20)
    assert not any(calls[1.0].errors + calls[0.5].errors)
    assert not np.allclose(logits(served), before)
    assert served.ready() and served.restarts == 0
    with urllib.request.urlopen(metrics_url, timeout=60) as answer:
        assert b"nv_inference" in answer.read()


def test_an_update_while_another_is_under_way_is_refused(served):
    assert served._reloading.acquire()
    try:
        with pytest.raises(SaccadeError, match="already being read"):
            served.reload()
    finally:
        served._reloading.release()


def test_an_update_under_another_name_is_refused(served, place, monkeypatch):
    """Its callers ask for the old name, and would all be told that there is no such model."""
    other = SimpleNamespace(model="other", variants=served.variants)
    monkeypatch.setattr(server_module, "read_repository", lambda _: other)
    monkeypatch.setattr(server_module, "preflight", lambda _: pytest.fail("too late"))
    with pytest.raises(SaccadeError, match="serves 'other', but callers ask for 'tiny'"):
        served.reload()
    assert served.model == "tiny" and served.ready()


def test_a_hang_up_during_an_update_is_kept_for_afterwards(eventually, caplog, monkeypatch):
    monkeypatch.setattr("saccade.serving.server.serve._has_terminal", lambda: False)
    go, reloads = threading.Semaphore(0), []

    def reload():
        reloads.append(1)
        assert go.acquire(timeout=60)
        if len(reloads) == 1:
            raise SaccadeError("It is not ready to serve.")

    hang_up = HangUp(ignored=False)
    hang_up.call(SimpleNamespace(reload=reload))
    try:
        with caplog.at_level("INFO", "saccade.serve"):
            hang_up(signal.SIGHUP)
            eventually(lambda: len(reloads) == 1, 60)
            hang_up(signal.SIGHUP)
            hang_up(signal.SIGHUP)
            assert len(reloads) == 1 and caplog.text.count("an update is in progress") == 2
            go.release(2)
            eventually(lambda: "The new repository is being served." in caplog.text, 60)
            assert len(reloads) == 2 and "The update failed." in caplog.text
    finally:
        hang_up.close()
        go.release(9)


def test_new_callers_go_where_they_are_sent():
    # Two sockets share a port; without the program the kernel would spread 64 callers over both.
    with listener(0) as first, listener(first.getsockname()[1]) as second:
        port = first.getsockname()[1]
        both = addresses.listeners(port)
        assert len(both) == 2 == len(addresses.own(both, os.getpid()))
        ours = SimpleNamespace(pid=os.getpid(), ports=lambda: (port,))
        assert foreign_listeners(ours) == []
        assert foreign_listeners(SimpleNamespace(pid=os.getppid(), ports=ours.ports)) == [port]
        for place, taker in ((0, first), (1, second), (0, first)):
            addresses.send_callers_to(both, place)
            callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
            other = second if taker is first else first
            assert taken(taker) == 64 and taken(other) == 0
            for caller in callers:
                caller.close()


def listener(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(128)
    listening.settimeout(0.2)
    return listening


def taken(waiting: socket.socket) -> int:
    count = 0
    while True:
        try:
            waiting.accept()[0].close()
            count += 1
        except TimeoutError:
            return count
