# SPDX-License-Identifier: Apache-2.0
"""Addresses that the server listens at, and whether those places are free."""

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from saccade.errors import SaccadeError

LOG_FORMATS = ("text", "json")
PORTS = ("grpc_port", "http_port", "metrics_port", "ready_port")


@dataclass(frozen=True)
class ServeOptions:
    """Options of serve: where it listens, and what follows a failure. Port 0 takes a free one."""

    host: str = "127.0.0.1"  # address to listen on; anything but loopback needs your consent
    grpc_port: int = 8001  # inference over gRPC
    http: bool = False  # also listen for HTTP, which one large request can end (docs/serving.md)
    http_port: int = 8000  # inference over HTTP, where it is on
    metrics_port: int = 8002  # Prometheus metrics
    ready_port: int = 8003  # GET /ready answers 200 or 503
    start_timeout_s: float = 60  # the server has this long to load every model and answer
    probe_interval_s: float = 5  # each variant makes one inference this often
    probe_timeout_s: float = 2  # and has this long for it
    grace_s: float = 30  # a server that was replaced has this long for calls still in flight
    server_log: Path | None = None  # the server's own log, as it wrote it
    log_format: Literal["text", "json"] = "text"  # of what is written to standard error
    restart: bool = True  # whether a server that fails is restarted, or the command ends with 3
    accept_risk: bool = False  # consent to listen beyond loopback

    def __post_init__(self) -> None:
        if self.log_format not in LOG_FORMATS:
            raise SaccadeError(
                f"log_format is {self.log_format!r:.60}, expected {' or '.join(LOG_FORMATS)}."
            )
        for name in PORTS:
            if not 0 <= getattr(self, name) <= 65535:
                raise SaccadeError(
                    f"{flag_of(name)} {getattr(self, name)} is not a port. "
                    "Give 1 to 65535, or 0 for a free one."
                )
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_open = field.name != "grace_s"
            if field.name.endswith("_s") and not (value > 0 or (value == 0 and not least_is_open)):
                raise SaccadeError(
                    f"{flag_of(field.name)} {value} is not a duration. Give seconds."
                )


def with_ports(options: ServeOptions) -> ServeOptions:
    """The same options with every 0 replaced by a free port, and the others found free.

    A host's name becomes its address, which the server's protocols would else choose each.
    Raises: SaccadeError naming the port that is taken and the flag that changes it.
    """
    names = listening(options)
    options = replace(options, host=numeric(options.host))
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    try:
        # All are held until the last is found, so that no two get the same one.
        for name in sorted(names, key=lambda name: getattr(options, name) == 0):
            listener = _bind(options.host, getattr(options, name), name, chosen)
            held.append(listener)
            chosen[name] = listener.getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return replace(options, **chosen)  # type: ignore[arg-type]


def listening(options: ServeOptions) -> tuple[str, ...]:
    """The fields of the ports that are listened on.

    Raises: SaccadeError for a port of HTTP where that is off.
    """
    if options.http:
        return PORTS
    if options.http_port not in (0, ServeOptions.http_port):
        raise SaccadeError(
            f"--http-port {options.http_port}: HTTP is off. Add --http to listen there (Python: "
            "ServeOptions(http=True)), or leave the port out and call over gRPC."
        )
    return tuple(name for name in PORTS if name != "http_port")


def address(host: str, port: int) -> str:
    """`host:port` as a client on this machine writes it."""
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def numeric(host: str) -> str:
    """The address of a host's name.

    Raises: SaccadeError if it has none.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise SaccadeError(
            f"--host {host}: is neither an IPv4 address nor the name of one ({error}). Give an "
            "address of this machine, or leave the option out for 127.0.0.1."
        ) from error


def _bind(host: str, port: int, name: str, chosen: dict[str, int]) -> socket.socket:
    refuse_shared(name, port, chosen)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As the server does: a port that only has connections in TIME_WAIT is free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise SaccadeError(
                f"--host {host}: this machine has no such address ({error.strerror}). "
                "Give an address of its own, or leave the option out for 127.0.0.1."
            ) from error
        raise SaccadeError(
            f"Port {port} on {host} cannot be used ({error.strerror}). "
            f"End what holds it, or choose another with {flag_of(name)} (0 takes a free one)."
        ) from error
    return listener


def refuse_shared(name: str, port: int, chosen: Mapping[str, int]) -> None:
    """Raises: SaccadeError if another of the ports chosen so far is this one."""
    for other, taken in chosen.items():
        if taken == port:
            raise SaccadeError(f"{flag_of(name)} and {flag_of(other)} are both {port}. Change one.")


def flag_of(name: str) -> str:
    """The option that sets a field."""
    return "--" + name.replace("_", "-")
