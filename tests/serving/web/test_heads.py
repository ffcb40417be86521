# SPDX-License-Identifier: Apache-2.0
"""Heads of requests that are too long or too late: the connection is closed."""

import http.client
import socket
import threading
import time
from contextlib import suppress

import pytest
import uvicorn

from saccade.serving.web import main


@pytest.fixture
def port(monkeypatch):
    """An application that answers everything, in the process's own kind of connection."""
    monkeypatch.setattr(main, "HEAD_S", 0.5)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=main.HeadLimits, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def closed_after(connection):
    """The seconds until the other side closes."""
    began = time.monotonic()
    with connection, suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    return time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_head_that_does_not_end_is_not_waited_for(port, sent):
    caller = socket.create_connection(("127.0.0.1", port), timeout=30)
    caller.sendall(sent)
    assert closed_after(caller) > 0.2


def test_the_next_head_of_a_connection_is_waited_for_as_long(port):
    caller = socket.create_connection(("127.0.0.1", port), timeout=30)
    caller.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert caller.recv(4096).startswith(b"HTTP/1.1 200")
    time.sleep(1)  # idle, between two requests
    caller.sendall(b"GET / HTTP/1.1\r\n")
    assert closed_after(caller) > 0.2


def test_a_long_head_is_not_kept(port, monkeypatch):
    monkeypatch.setattr(main, "HEAD_S", 60)
    caller = socket.create_connection(("127.0.0.1", port), timeout=30)
    with pytest.raises(OSError):
        caller.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(10_000):
            caller.sendall(b"X: " + b"a" * 10_000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/", headers={"X": "a" * 30_000})
    assert connection.getresponse().status == 200
