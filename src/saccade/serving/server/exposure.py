# SPDX-License-Identifier: Apache-2.0
"""Exposure of the server to whoever reaches it: said at its start, since it cannot be closed."""

import logging
from collections.abc import Iterator
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.serving.client.connection import is_loopback
from saccade.serving.repository.requirements import MENDED_LINE, Requirements
from saccade.serving.server.addresses import ServeOptions

_HTTP = (
    "HTTP is on: one request of a million small chunks ends the server, and pages that a browser "
    "on this machine shows can send requests. Put docker/proxy before it, or call over gRPC."
)
_MESSAGES = (
    "A message may have up to 2 GiB, and the server takes several times that in memory. Bound it "
    "with the proxy of docker/proxy, or all of it with `systemd-run --user --scope -p MemoryMax=4G "
    "saccade serve ...`."
)


def check_repository(repository: Path, requirements: Requirements, options: ServeOptions) -> None:
    """A repository in which one request ends the server is not shown to others.

    Raises: SaccadeError for one that has outputs of strings, and a host beyond loopback.
    """
    if requirements.strings and not is_loopback(options.host):
        raise SaccadeError(
            f"--host {options.host}: {strings_of(repository, requirements)} Or leave --host out."
        )


def strings_of(repository: Path, requirements: Requirements) -> str:
    """Why outputs of strings are a danger, and what to do."""
    return (
        f"{repository} was written by an older release: {', '.join(requirements.strings)} are "
        "strings, and one request that asks for their classes ends a server older than "
        f"{MENDED_LINE}. Run `saccade repository` again."
    )


def notices(
    repository: Path, requirements: Requirements, options: ServeOptions
) -> Iterator[tuple[int, str]]:
    """Notices of what stays open, each with the log's level."""
    if requirements.strings:
        yield logging.WARNING, strings_of(repository, requirements)
    if options.http:
        yield logging.WARNING, _HTTP
    yield logging.INFO, _MESSAGES
