# SPDX-License-Identifier: Apache-2.0
"""Connections that send nothing, half a request, or garbage."""

import gzip
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from chaos.scene import Scene, picture_request

HELD_S = 5.0
CONNECTIONS = 1500
PROBED_S = 7.0  # longer than the interval at which the service probes its variants
# The start of HTTP/2: preface, empty settings, and the head of a request that never continues.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HALF_HEAD = bytes((0, 16, 0, 1, 0, 0, 0, 0, 1)) + b"\x83\x86"
_HALF_POST = b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{"


def half_requests(scene: Scene) -> None:
    """Callers whose machine disappears in the middle of a request."""
    half_post = _HALF_POST % scene.models.router.encode()
    with ExitStack() as open_ones:
        for turn in range(200):
            over_http = bool(scene.service.http) and turn % 2
            place = scene.service.http if over_http else scene.service.grpc
            connection = _connect(place)
            open_ones.enter_context(connection)
            with suppress(OSError):
                connection.sendall(half_post if over_http else _PREFACE + _HALF_HEAD)
        time.sleep(HELD_S)


def idle_connections(scene: Scene) -> None:
    """Open more connections than a process may usually open files; new callers must get an answer.

    Only new callers matter: earlier ones have their connections.
    """
    places = [place for place in (scene.service.http, scene.service.grpc) if place]
    with _many_descriptors(), ExitStack() as open_ones:
        for turn in range(CONNECTIONS):
            with suppress(OSError):
                open_ones.enter_context(_connect(places[turn % len(places)]))
        time.sleep(PROBED_S)
        ready = scene.service.ready()
        message = picture_request(scene.models, scene.models.cheap).SerializeToString()
        scene.send([message] * 3, timeout_s=5)
        answered = scene.heard["OK"] == 3
    scene.heard.clear()
    says = f"/ready says {'yes' if ready else 'no'}"
    finds = "is answered" if answered else "is not answered"
    scene.checks.append((f"{says}, and a new caller {finds}", answered or not ready))


def one_byte_chunks(scene: Scene) -> None:
    """Send a body in chunks of one byte (the class of CVE-2025-23310)."""
    if not scene.service.http:
        scene.checks.append(("HTTP is off", True))
        return
    head = _head(scene, "Transfer-Encoding: chunked")
    with suppress(OSError), _connect(scene.service.http) as connection:
        connection.settimeout(30)
        connection.sendall(head.encode())
        for _ in range(1000):
            connection.sendall(b"1\r\nx\r\n" * 1000)
        connection.sendall(b"0\r\n\r\n")
        connection.recv(1000)


def nested_json(scene: Scene) -> None:
    """Send JSON whose parser needs more stack than there is (the class of CVE-2025-23311)."""
    _post(scene, b"[" * 150_000)


def packed_bodies(scene: Scene) -> None:
    """Send small bodies that are large once they are unpacked, which the server never frees."""
    packed = gzip.compress(bytes(100 * 2**20))
    for _ in range(4):
        _post(scene, packed, "Content-Encoding: gzip")


def garbage_bytes(scene: Scene) -> None:
    """Send bytes like those of a port scanner, and worse."""
    for turn in range(200):
        place = scene.service.http if scene.service.http and turn % 2 else scene.service.grpc
        start = scene.rng.choice((b"", _PREFACE, b"GET / HTTP/1.1\r\n", b"\x16\x03\x01"))
        with suppress(OSError), _connect(place) as connection:
            connection.sendall(start + scene.rng.randbytes(scene.rng.randrange(1, 5000)))
            connection.recv(100)


def _head(scene: Scene, *headers: str) -> str:
    lines = (f"POST /v2/models/{scene.models.router}/infer HTTP/1.1", "Host: x", *headers, "", "")
    return "\r\n".join(lines)


def _post(scene: Scene, body: bytes, *headers: str) -> None:
    if not scene.service.http:
        scene.checks.append(("HTTP is off", True))
        return
    with suppress(OSError), _connect(scene.service.http) as connection:
        connection.settimeout(30)
        head = _head(scene, f"Content-Length: {len(body)}", *headers)
        connection.sendall(head.encode() + body)
        connection.recv(1000)


def _connect(place: str) -> socket.socket:
    host, port = place.split(":")
    connection = socket.create_connection((host, int(port)), timeout=2)
    connection.settimeout(0.5)
    return connection


@contextmanager
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
