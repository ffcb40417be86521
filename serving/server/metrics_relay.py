# SPDX-License-Identifier: Apache-2.0
"""One address for the metrics of whichever server runs now.

Two servers cannot share the port of their metrics, so each has one of its own and this hands on
what the present one says.
"""

import http.client
import socket
from collections.abc import Callable

from saccade.serving.server.addresses import address
from saccade.serving.server.http_endpoint import Answer, HttpEndpoint

_TIMEOUT_S = 5
OWN_HOST = "127.0.0.1"  # where each server says them; callers ask the relay


class MetricsRelay(HttpEndpoint):
    """`GET /metrics`; `port_of` says where the present server's own are, 0 if none runs."""

    def __init__(self, host: str, port: int, port_of: Callable[[], int]) -> None:
        def answer() -> Answer:
            own = port_of()
            status, body = metrics(own) if own else (503, b"no server runs now\n")
            return status, "text/plain; charset=utf-8", body

        super().__init__(host, port, "--metrics-port", ("/metrics",), answer)


def metrics(port: int, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
    """Metrics at a server's own port; 503 where it says nothing."""
    connection = http.client.HTTPConnection(address(OWN_HOST, port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 503, f"the server's metrics cannot be read ({error})\n".encode()
    finally:
        connection.close()


def hold_port() -> socket.socket:
    """A socket that keeps a free port from all who look for one, but not from who is told it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((OWN_HOST, 0))
    return held
