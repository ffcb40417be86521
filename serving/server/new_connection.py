# SPDX-License-Identifier: Apache-2.0
"""Check that a server accepts new callers, which it may not do while it answers existing ones."""

import socket
import threading
import time
from dataclasses import replace

from saccade.serving.client.readiness import Readiness

# The preface that a caller sends over HTTP/2, and settings that change nothing.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_ASKED_EVERY_S = 1.0


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
