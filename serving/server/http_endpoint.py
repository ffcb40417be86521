# SPDX-License-Identifier: Apache-2.0
"""The supervisor's own HTTP endpoints: its readiness, and one page of metrics.

They keep few connections, short ones, and answer no foreign web page. Two servers cannot share a
metrics port, so each has its own, and the relay forwards the page of the current one, followed by
the metrics of the supervisor. While no server runs, the page contains only the latter.
"""

import http.client
import json
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

from saccade.serving.client.readiness import Readiness
from saccade.serving.server.addresses import address, port_in_use
from saccade.serving.web.origin import foreign

MAX_CONNECTIONS = 64
MAX_SECONDS = 5.0  # from connection to the last byte of the answer, for slow callers too

JSON = "application/json"
Answer = tuple[int, str, bytes]  # status, content type, body

_TIMEOUT_S = 2  # leaves time for the supervisor's part before the endpoint's own limit
OWN_HOST = "127.0.0.1"  # where each server exposes its metrics; callers use the relay
_PAGE = "text/plain; version=0.0.4; charset=utf-8"
PROXY_FAMILIES = {
    "proxy_active": "Calls in progress in the proxy",
    "proxy_refused_total": "Calls that the proxy refused because of its limit",
    "proxy_restarts_total": "Restarts of the proxy after it died",
}
_FAMILY = re.compile(r"^(?=# HELP )", re.MULTILINE)
_HISTOGRAM = re.compile(r"# HELP (saccade_\w+_seconds)_(bucket|count|sum) (.*)\n# TYPE .*\n")
_BUCKET = re.compile(r'le="([^"]*)",?')

# The preface that a caller sends over HTTP/2, and settings that change nothing.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_ASKED_EVERY_S = 1.0


class HttpEndpoint:
    """Answers `GET` requests on a separate thread; `option` is the flag that sets the port.

    Raises: SaccadeError if the port is in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        option: str,
        paths: tuple[str, ...],
        answer: Callable[[], Answer],
    ) -> None:
        members = {"paths": paths, "answer": staticmethod(answer)}
        try:
            self._server = _Endpoint((host, port), type("Handler", (_Handler,), members))
        except OSError as error:
            raise port_in_use(host, port, option, error) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name=paths[0], daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def json_line(content: dict[str, Any]) -> bytes:
    """Return the body of a JSON answer."""
    return json.dumps(content).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    paths: tuple[str, ...]
    answer: Callable[[], Answer]
    server_version = "saccade"
    sys_version = ""

    def do_GET(self) -> None:
        status, content_type, body = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> Answer:
        if reason := foreign(self.headers):
            return 403, JSON, json_line({"error": reason})
        if self.path.partition("?")[0] not in self.paths:
            return 404, JSON, json_line({"error": f"no such path; request {self.paths[0]}"})
        return type(self).answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there are requests every second."""


class _Endpoint(ThreadingHTTPServer):
    """Server that keeps few connections, none of them long: idle ones block nobody."""

    daemon_threads = True
    # If more than this many wait to be accepted, a caller's system retries after a second.
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._opened: dict[socket.socket, float] = {}
        self._changing = threading.Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind without looking up the host name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a separate thread; the oldest connection makes room for a new caller."""
        with self._changing:
            if len(self._opened) >= MAX_CONNECTIONS:
                self._end(next(iter(self._opened)))
            self._opened[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that have been open for too long; called several times a second."""
        latest = time.monotonic() - MAX_SECONDS
        with self._changing:
            for request in [
                connection for connection, since in self._opened.items() if since < latest
            ]:
                self._end(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that is no longer needed."""
        with self._changing:
            self._opened.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing about callers that have gone or were disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _end(self, request: socket.socket) -> None:
        # The connection's thread wakes up and closes it.
        del self._opened[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class ReadyEndpoint(HttpEndpoint):
    """Answers 200 or 503, with the readiness as JSON."""

    def __init__(self, host: str, port: int, ask: Callable[[], Readiness]) -> None:
        def answer() -> Answer:
            readiness = ask()
            return 200 if readiness else 503, JSON, json_line(readiness.to_dict())

        super().__init__(host, port, "--ready-port", ("/ready", "/"), answer)


class Watched(NamedTuple):
    """What a supervisor knows about the service that it keeps running."""

    readiness: Readiness
    restarts: int
    replacements: int
    reloads: Mapping[str, int]  # by model
    proxy: Mapping[str, int] = MappingProxyType({})  # its figures; empty without one


class MetricsRelay(HttpEndpoint):
    """Answers `GET /metrics`; `port_of` returns the current server's port, or 0 without one."""

    def __init__(
        self, host: str, port: int, port_of: Callable[[], int], watched: Callable[[], Watched]
    ) -> None:
        def answer() -> Answer:
            own = port_of()
            status, body = metrics(own) if own else (503, b"")
            up = status == 200
            page = with_histograms(body.decode()) if up else ""
            return 200, _PAGE, (page + service_page(watched(), up=up)).encode()

        super().__init__(host, port, "--metrics-port", ("/metrics",), answer)


def metrics(port: int, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
    """Return the metrics at a server's own port, or 503 if it does not answer."""
    connection = http.client.HTTPConnection(address(OWN_HOST, port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 503, f"the server's metrics cannot be read ({error})\n".encode()
    finally:
        connection.close()


def with_histograms(page: str) -> str:
    """Return the page with the router's histograms, which the server exposes as counters."""
    others: list[str] = []
    histograms: dict[str, dict[str, str]] = {}
    for family in _FAMILY.split(page):
        if head := _HISTOGRAM.match(family):
            name, part, description = head.groups()
            parts = histograms.setdefault(name, {"": description})
            parts[part] = family[head.end() :]
        else:
            others.append(family)
    for name, parts in histograms.items():
        buckets = sorted(parts.get("bucket", "").splitlines(), key=_bucket_order)
        others += [f"# HELP {name} {parts['']}\n# TYPE {name} histogram\n"]
        others += [f"{line}\n" for line in buckets]
        others += [parts.get("sum", ""), parts.get("count", "")]
    return "".join(others)


def _bucket_order(line: str) -> tuple[str, float]:
    edge = _BUCKET.search(line)
    labels = _BUCKET.sub("", line.rpartition(" ")[0])
    return labels, float(edge[1]) if edge else 0.0


def service_page(watched: Watched, *, up: bool) -> str:
    """Return the supervisor's part; `up` is whether the server's own metrics were read."""
    readiness, reloads = watched.readiness, watched.reloads
    whole = f'model="{escaped(readiness.model)}"'
    of_variant = {name: f'{whole},variant="{escaped(name)}"' for name in readiness.variants}
    answering = {labels: readiness.variants[name] for name, labels in of_variant.items()}
    reloaded = {labels: reloads.get(name, 0) for name, labels in of_variant.items()}
    served = {f'{whole},sha256="{readiness.repository}"': 1}
    families: dict[str, tuple[str, Mapping[str, int]]] = {
        "repository_info": ("SHA-256 of the served repository's saccade.json; always 1", served),
        "server_up": ("1 if the server's own metrics were read", {whole: up}),
        "ready": ("1 if /ready answers 200", {whole: readiness.ready}),
        "router_ready": ("1 if the router answered its last probe", {whole: readiness.router}),
        "variant_ready": ("1 if the variant answered its last probe", answering),
        "server_restarts_total": (
            "Restarts of the server after it died or hung",
            {whole: watched.restarts},
        ),
        "server_replacements_total": (
            "Running servers that were replaced by a new one",
            {whole: watched.replacements},
        ),
        "router_reloads_total": (
            "Reloads of the router after its process died",
            {whole: reloads.get(readiness.model, 0)},
        ),
        "variant_reloads_total": ("Reloads of a variant after its process died", reloaded),
    }
    for name, description in PROXY_FAMILIES.items():
        if (key := name.split("_")[1]) in watched.proxy:
            families[name] = (description, {whole: watched.proxy[key]})
    lines = []
    for name, (description, samples) in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP saccade_{name} {description}", f"# TYPE saccade_{name} {kind}"]
        lines += [f"saccade_{name}{{{labels}}} {value:d}" for labels, value in samples.items()]
    return "".join(f"{line}\n" for line in lines)


def escaped(text: str) -> str:
    """Escape text for the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def hold_port() -> socket.socket:
    """Return a socket that reserves a free port, which a process that knows it can still use."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((OWN_HOST, 0))
    return held


def refusal(host: str, port: int, timeout_s: float) -> str:
    """Return why a new gRPC connection fails; empty if the server answers it.

    A server without free file descriptors lets callers connect, but never answers them.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(_GREETING)
            return "" if connection.recv(1) else "the server closes new connections"
    except TimeoutError:
        return f"a new connection was not answered within {timeout_s:g} s"
    except OSError as error:
        return f"a new connection failed ({error.strerror or error})"


class NewCaller:
    """Checks what a new caller would get, at most once per second."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._place = (host, port, timeout_s)
        self._lock = threading.Lock()
        self._asked_s = -_ASKED_EVERY_S
        self._reason = ""

    def sees(self, known: Readiness) -> Readiness:
        """Return the readiness with `new_connections`, which is false if there is no server."""
        if known.state != "serving":
            return replace(known, new_connections=False)
        with self._lock:
            if time.monotonic() - self._asked_s >= _ASKED_EVERY_S:
                self._reason = refusal(*self._place)
                self._asked_s = time.monotonic()
            reason = self._reason
        if not reason:
            return known
        return replace(
            known, new_connections=False, reasons={**known.reasons, "new_connections": reason}
        )
