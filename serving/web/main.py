# SPDX-License-Identifier: Apache-2.0
"""The process of the HTTP API: `python -P -m saccade.serving.web.main FD`.

It answers on a socket that it inherits. The settings come as one line of JSON on standard input,
because they contain keys.
"""

import asyncio
import json
import math
import socket
import sys

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from saccade.serving.web.api import Api

HEAD_BYTES, HEAD_S = 2**16, 10.0
MOST_CONNECTIONS = 512  # below the usual limit of open files


class HeadLimits(HttpToolsProtocol):
    """A connection that is closed if the head of a request is too long or takes too long.

    uvicorn has neither limit, so silent callers could take all connections.
    """

    head_bytes = 0
    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Count the bytes while no head is complete."""
        if self.head_timer is None and self.cycle.response_complete:
            self._expect_head()  # of another request on this connection
        super().data_received(data)
        if self.head_timer is not None:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_BYTES:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        """Stop counting."""
        super().on_headers_complete()
        self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._forget_head()

    def _expect_head(self) -> None:
        self.head_bytes = 0
        self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_head(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


def main() -> None:
    """Answer until SIGTERM, then finish the requests that run."""
    settings = json.loads(sys.stdin.readline())
    config = uvicorn.Config(
        Api(settings["url"], settings["model"], settings["keys"]),
        http=HeadLimits,
        log_config=None,
        log_level="error",  # a caller could fill the log with warnings about its own requests
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=math.ceil(settings["grace_s"]),
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()
