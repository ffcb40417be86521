# SPDX-License-Identifier: Apache-2.0
"""One address for the metrics of whichever server runs now.

Two servers cannot share the port of their metrics, so each has one of its own and this hands on
what the present one says.
"""

import http.client
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from saccade.plugins.errors import SaccadeError
from saccade.serving.addresses import address

_TIMEOUT_S = 5


class MetricsRelay:
    """`GET /metrics` on a thread of its own; `port_of` says where the server's own are, 0 if none.

    Raises: SaccadeError if the port is taken.
    """

    def __init__(self, host: str, port: int, port_of: Callable[[], int]) -> None:
        self._host, self._port_of = host, port_of
        handler = type("Handler", (_Handler,), {"fetch": staticmethod(self.fetch)})
        try:
            self._server = _Listener((host, port), handler)
        except OSError as error:
            raise SaccadeError(
                f"Port {port} on {host} cannot be used ({error.strerror}). "
                "End what holds it, or choose another with --metrics-port (0 takes a free one)."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True
        )
        self._thread.start()

    def fetch(self) -> tuple[int, bytes]:
        """Status and text of the present server's metrics."""
        port = self._port_of()
        return metrics(self._host, port) if port else (503, b"no server runs now\n")

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics(host: str, port: int, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
    """What a server says at its own port; 503 where it says nothing."""
    connection = http.client.HTTPConnection(address(host, port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 503, f"the server's metrics cannot be read ({error})\n".encode()
    finally:
        connection.close()


def hold_port(host: str) -> socket.socket:
    """A socket that keeps a free port from all who look for one, but not from who is told it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class _Handler(BaseHTTPRequestHandler):
    fetch: Callable[[], tuple[int, bytes]]
    timeout = _TIMEOUT_S
    server_version = "saccade"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "Ask for /metrics")
            return
        status, body = type(self).fetch()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: it is scraped every few seconds."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
