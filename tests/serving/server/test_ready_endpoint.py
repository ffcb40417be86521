# SPDX-License-Identifier: Apache-2.0
"""/ready and metrics: this machine is answered, other sites are not, and no server is said."""

import http.client
import json
import resource
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from metric_pages import numbers_in, page_of, types_in

from saccade.core.errors import ServerFailed
from saccade.serving.client.readiness import Readiness
from saccade.serving.server import http_endpoint
from saccade.serving.server.http_endpoint import (
    MAX_CONNECTIONS,
    HttpEndpoint,
    MetricsRelay,
    NewCaller,
    Watched,
    refusal,
    service_page,
)
from saccade.serving.server.server import ReadyEndpoint

READY = Readiness("serving", "m", True, {"m-b1000-fp32": True})
ALL_READY = Watched(READY, restarts=0, replacements=0, reloads={})


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
    relay = MetricsRelay("127.0.0.1", 0, lambda: 0, lambda: ALL_READY)
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


ONE, TWO = "m-b0500-fp32", "m-b1000-fp32"
HALF_DEAD = Readiness("serving", "m", True, {ONE: False, TWO: True}, repository="ab12")
WATCHED = Watched(HALF_DEAD, restarts=3, replacements=2, reloads={"m": 4, ONE: 5, "gone": 6})
# As the server prints them: counters, in no order.
COUNTERS = """# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 7
# HELP saccade_waiting_seconds_bucket Time that a request waited
# TYPE saccade_waiting_seconds_bucket counter
saccade_waiting_seconds_bucket{le="+Inf",model="m",variant="b"} 3
saccade_waiting_seconds_bucket{le="0.5",model="m",variant="a"} 1
saccade_waiting_seconds_bucket{le="+Inf",model="m",variant="a"} 2
saccade_waiting_seconds_bucket{le="0.5",model="m",variant="b"} 3
# HELP saccade_waiting_seconds_sum Time that a request waited
# TYPE saccade_waiting_seconds_sum counter
saccade_waiting_seconds_sum{model="m",variant="a"} 9.5
saccade_waiting_seconds_sum{model="m",variant="b"} 0.1
# HELP saccade_waiting_seconds_count Time that a request waited
# TYPE saccade_waiting_seconds_count counter
saccade_waiting_seconds_count{model="m",variant="a"} 2
saccade_waiting_seconds_count{model="m",variant="b"} 3
# HELP saccade_answers_total Requests that a variant answered
# TYPE saccade_answers_total counter
saccade_answers_total{model="m",variant="a"} 2
"""


@contextmanager
def relayed(own_page):
    """The URL of a relay before a server with this page; None: none runs."""
    own = HttpEndpoint(
        *("127.0.0.1", 0, "--x", ("/metrics",)),
        lambda: (200 if own_page else 503, "text/plain", (own_page or "").encode()),
    )
    relay = MetricsRelay(
        "127.0.0.1", 0, lambda: 0 if own_page is None else own.port, lambda: WATCHED
    )
    try:
        yield f"http://127.0.0.1:{relay.port}/metrics"
    finally:
        relay.close()
        own.close()


def test_buckets_are_handed_on_as_a_histogram():
    with relayed(COUNTERS) as url:
        page = page_of(url)
    types, number = types_in(page), numbers_in(page)
    assert types["saccade_waiting_seconds"] == "histogram"
    assert types["nv_inference_count"] == types["saccade_answers"] == "counter"
    buckets = [line for line in page.splitlines() if line.startswith("saccade_waiting_seconds_b")]
    assert [line.partition(" ")[2] for line in buckets] == ["1", "2", "3", "3"]
    assert number("saccade_waiting_seconds_sum", variant="a") == 9.5
    assert number("saccade_waiting_seconds_count") == 5
    assert number("nv_inference_count_total", model="m") == 7  # the parser's name
    assert number("saccade_answers_total", model="m", variant="a") == 2
    assert number("saccade_server_up", model="m") == 1


@pytest.mark.parametrize("own_page", [None, ""], ids=["no server", "a server that says nothing"])
def test_restarts_and_readiness_are_said_while_no_server_is(own_page):
    with relayed(own_page) as url:
        page = page_of(url)
    number = numbers_in(page)
    assert number("saccade_server_up", model="m") == number("saccade_ready", model="m") == 0
    assert number("saccade_repository_info", model="m", sha256="ab12") == 1
    assert number("saccade_variant_ready", variant=ONE) == 0
    assert number("saccade_variant_ready", variant=TWO) == number("saccade_router_ready") == 1
    assert number("saccade_server_restarts_total", model="m") == 3
    assert number("saccade_server_replacements_total", model="m") == 2
    assert number("saccade_router_reloads_total", model="m") == 4
    assert number("saccade_variant_reloads_total", variant=ONE) == 5
    assert number("saccade_variant_reloads_total", variant=TWO) == 0
    assert "gone" not in page, "what is no longer served"


def test_any_name_is_a_label():
    odd = 'a"b\\c'
    page = service_page(WATCHED._replace(readiness=Readiness("serving", odd, True, {})), up=True)
    assert numbers_in(page)("saccade_ready", model=odd) == 1
