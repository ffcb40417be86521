# SPDX-License-Identifier: Apache-2.0
"""`/ready` answers this machine, whoever else is connected; and says what a new caller meets."""

import http.client
import json
import resource
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.core.errors import ServerFailed
from saccade.serving.client.readiness import Readiness
from saccade.serving.server import http_endpoint
from saccade.serving.server.http_endpoint import (
    MAX_CONNECTIONS,
    MetricsRelay,
    NewCaller,
    Watched,
    refusal,
)
from saccade.serving.server.server import ReadyEndpoint

READY = Readiness("serving", "m", True, {"m-b1000-fp32": True})
WATCHED = Watched(READY, restarts=0, replacements=0, reloads={})


@pytest.fixture
def port():
    """An endpoint that always says ready."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        free = holder.getsockname()[1]
    endpoint = ReadyEndpoint("127.0.0.1", free, lambda: READY)
    yield free
    endpoint.close()


def ask(port, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request("GET", "/ready", headers=named)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example:8003"},
        {"Host": "127.0.0.1.rebound.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_pages_of_other_sites_are_refused(port, headers):
    status, said = ask(port, **headers)
    assert status == 403 and set(said) == {"error"}


def test_metrics_are_not_for_pages_of_other_sites():
    relay = MetricsRelay("127.0.0.1", 0, lambda: 0, lambda: WATCHED)
    try:
        own = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
        own.request("GET", "/metrics", headers={"Host": "rebound.example:8002"})
        assert own.getresponse().status == 403
    finally:
        relay.close()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:8003"},
        {"Host": "10.1.2.3:8003"},
        {"Host": "[::1]:8003"},
        {"Host": socket.gethostname()},
        {"Host": "localhost", "Origin": "http://localhost"},
        {"Sec_Fetch_Site": "none"},
    ],
)
def test_this_machine_and_its_probes_are_answered(port, headers):
    assert ask(port, **headers) == (200, READY.to_dict())


def test_idle_callers_keep_nobody_out(port, eventually, monkeypatch):
    monkeypatch.setattr(http_endpoint, "MAX_SECONDS", 1e6)  # not time is what ends them here
    others = set(threading.enumerate())  # servers of other tests may still hold callers
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        assert ask(port)[0] == 200
        eventually(lambda: len(set(threading.enumerate()) - others) <= MAX_CONNECTIONS, 10)


def test_a_slow_caller_is_ended(port, monkeypatch):
    monkeypatch.setattr(http_endpoint, "MAX_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port), 10) as slow:
        slow.settimeout(0.1)
        for _ in range(100):
            try:
                slow.sendall(b"G")  # each byte in time, the request never
                if slow.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("still connected")
    assert ask(port)[0] == 200


def test_a_server_that_greets_nobody_is_not_ready():
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections, and no more
        caller = NewCaller(*deaf.getsockname(), 0.1)
        readiness = caller.sees(READY)
        assert not readiness and readiness.variants == READY.variants
        assert "not answered within 0.1 s" in readiness.to_dict()["reasons"]["new_connections"]
        # It is asked as well while a variant is dead.
        dead = replace(READY, variants={"m-b1000-fp32": False})
        assert not caller.sees(dead).new_connections
        place = deaf.getsockname()
    assert "refused" in refusal(*place, 0.1).lower()
    # A caller who was refused a moment ago is told the same, without another attempt.
    assert caller.sees(READY) == readiness
    starting = Readiness("starting", "m", False, {})
    assert caller.sees(starting) == replace(starting, new_connections=False)


def answers(client, digit):
    try:
        return client.classify([digit])
    except ServerFailed:
        return []


def test_ready_says_that_new_callers_are_not_taken(server, client, digit, monkeypatch, eventually):
    monkeypatch.setattr(http_endpoint, "_ASKED_EVERY_S", 0.0)
    place, pid = ("127.0.0.1", server.options.grpc_port), server.pid
    assert refusal(*place, 10) == ""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    client.classify([digit])
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + 8, before[1]))
        with ExitStack() as idle:
            for _ in range(20):
                idle.enter_context(socket.create_connection(place, 10))
            eventually(lambda: not server.ready(), 20)
            assert refusal(*place, 2)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    # Without a descriptor the server cannot look at its models' folders either, and unloads them.
    eventually(lambda: server.ready() and answers(client, digit), 120)
    assert server.pid == pid
