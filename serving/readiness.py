# SPDX-License-Identifier: Apache-2.0
"""Whether every variant answers, and the one place that says so: `GET /ready`."""

import json
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from saccade.plugins.errors import SaccadeError

State = Literal["starting", "serving", "restarting", "stopped", "failed"]


@dataclass(frozen=True)
class Readiness:
    """Which models answered when last asked, and why the others did not. True if all did."""

    state: State
    model: str
    router: bool
    variants: dict[str, bool]
    reasons: dict[str, str] = field(default_factory=dict)
    busy: dict[str, str] = field(default_factory=dict)  # those that answer, but not at once

    @property
    def ready(self) -> bool:
        """Whether the router and every variant answer."""
        return self.state == "serving" and self.router and all(self.variants.values())

    def __bool__(self) -> bool:
        return self.ready

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ready": self.ready,
            "state": self.state,
            "model": self.model,
            "router": self.router,
            "variants": self.variants,
            "reasons": self.reasons,
            "busy": self.busy,
        }


class Board:
    """What the supervisor knows, readable from any thread."""

    def __init__(self, model: str, variants: tuple[str, ...]) -> None:
        self.model = model
        self.variants = variants
        self._lock = threading.Lock()
        self._state: State = "starting"
        self._reasons: dict[str, str] = {}
        self._busy: dict[str, str] = {}
        self.reset("starting")

    def reset(self, state: State) -> None:
        """Enter a state in which no model answers."""
        with self._lock:
            self._state = state
            self._reasons = dict.fromkeys((self.model, *self.variants), state)
            self._busy = {}

    def enter(self, state: State) -> None:
        """Enter a state and keep what is known of each model."""
        with self._lock:
            self._state = state

    def mark(self, name: str, reason: str) -> bool:
        """Note why a model does not answer, or `""` if it does. Returns whether that is new."""
        with self._lock:
            before = self._reasons.get(name, "")
            self._reasons[name] = reason
            return before != reason

    def mark_busy(self, name: str, text: str) -> None:
        """Note how much waits for a model that answers, or `""` if nothing does."""
        with self._lock:
            self._busy[name] = text

    def readiness(self) -> Readiness:
        """The present state."""
        with self._lock:
            reasons = {name: reason for name, reason in self._reasons.items() if reason}
            busy = {name: text for name, text in self._busy.items() if text}
            return Readiness(
                self._state,
                self.model,
                self.model not in reasons,
                {name: name not in reasons for name in self.variants},
                reasons,
                busy,
            )


class ReadyEndpoint:
    """`GET /ready` on a thread of its own: 200 or 503, and the readiness as JSON."""

    def __init__(self, host: str, port: int, ask: Callable[[], Readiness]) -> None:
        handler = type("Handler", (_Handler,), {"ask": staticmethod(ask)})
        try:
            self._server = _Endpoint((host, port), handler)
        except OSError as error:
            raise SaccadeError(
                f"Port {port} on {host} cannot be used ({error.strerror}). "
                "End what holds it, or choose another with --ready-port (0 takes a free one)."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="ready", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    ask: Callable[[], Readiness]
    timeout = 5  # a caller that sends nothing does not keep a thread
    server_version = "saccade"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/ready", "/"):
            self.send_error(404, "Ask for /ready")
            return
        readiness = type(self).ask()
        body = json.dumps(readiness.to_dict()).encode() + b"\n"
        self.send_response(200 if readiness else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: health checks come every second."""


class _Endpoint(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
