# SPDX-License-Identifier: Apache-2.0
"""Known weaknesses of the server that saccade cannot fix, reported when it starts."""

import logging
from collections.abc import Iterator

from saccade.serving.server.addresses import ServeOptions

_HTTP = (
    "HTTP is on: one request with a million small chunks can crash the server, and web pages in a "
    "browser on this machine can send requests. Put docker/proxy in front of it, or use gRPC."
)
_MESSAGES = (
    "A message may be up to 2 GiB large, and the server needs several times that in memory. Limit "
    "the message with the proxy in docker/proxy, or the server with `systemd-run --user --scope -p "
    "MemoryMax=4G saccade serve ...`."
)


def notices(options: ServeOptions) -> Iterator[tuple[int, str]]:
    """Yield notices about remaining risks, each with a log level."""
    if options.http:
        yield logging.WARNING, _HTTP
    yield logging.INFO, _MESSAGES
