# SPDX-License-Identifier: Apache-2.0
"""The supervisor's own HTTP endpoint: few connections, short ones, and no foreign web pages."""

import ipaddress
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from saccade.core.errors import SaccadeError

MAX_CONNECTIONS = 64
MAX_SECONDS = 5.0  # from connection to the last byte of the answer, for slow callers too

JSON = "application/json"
Answer = tuple[int, str, bytes]  # status, content type, body


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
            raise SaccadeError(
                f"Port {port} on {host} cannot be used ({error.strerror}). Stop the process that "
                f"is using it (`ss -ltnp` shows it), or choose another port with {option} "
                "(0 takes a free one)."
            ) from error
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


def foreign(headers: Message) -> str:
    """Return why a request seems to come from a page of another site; empty if it does not.

    With DNS rebinding, the host name of a foreign page resolves to this machine, and the browser
    lets that page read our answers. Only an address or this machine's own name is therefore
    accepted as host.
    """
    host = headers.get("Host", "")
    if host and not _is_own(urlsplit(f"//{host}").hostname or host):
        return f"Host {host!r:.80} is neither an address nor a name of this machine"
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return f"Origin {origin!r:.80} is another site"
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "the request comes from a page of another site"
    return ""


def _is_own(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.rstrip(".").lower() in ("localhost", socket.gethostname().lower())


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
