# SPDX-License-Identifier: Apache-2.0
"""Known weaknesses of the server that saccade cannot fix, reported when it starts."""

import logging
from collections.abc import Iterator
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.serving.client.connection import is_loopback
from saccade.serving.repository.requirements import MENDED_LINE, Requirements
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


def check_repository(repository: Path, requirements: Requirements, options: ServeOptions) -> None:
    """Refuse to listen beyond loopback with a repository that lets one request crash the server.

    Raises: SaccadeError for a repository with string outputs and a host beyond loopback.
    """
    if requirements.strings and not is_loopback(options.host):
        raise SaccadeError(
            f"--host {options.host}: {strings_of(repository, requirements)} Or drop --host."
        )


def strings_of(repository: Path, requirements: Requirements) -> str:
    """Return why string outputs are dangerous, and what to do."""
    return (
        f"{repository} was written by an older release: {', '.join(requirements.strings)} are "
        "string outputs, and one request for their classes crashes a server older than "
        f"{MENDED_LINE}. Run `saccade repository` again."
    )


def notices(
    repository: Path, requirements: Requirements, options: ServeOptions
) -> Iterator[tuple[int, str]]:
    """Yield notices about remaining risks, each with a log level."""
    if requirements.strings:
        yield logging.WARNING, strings_of(repository, requirements)
    if options.http:
        yield logging.WARNING, _HTTP
    yield logging.INFO, _MESSAGES
