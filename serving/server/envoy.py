# SPDX-License-Identifier: Apache-2.0
"""Configuration of an Envoy proxy in front of one or more servers."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import write_atomically
from saccade.core.options import Options
from saccade.core.schema import Pattern, Range
from saccade.serving.client.connection import is_loopback

MIB = 2**20
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_READY_PATH = Pattern(r"(/[A-Za-z0-9._-]+)+", "a path such as /ready or /v2/health/ready")
LONGEST_SOCKET = 107  # bytes that the system allows for a socket's path
# Failures caused by a server that exited or accepts nothing; callers get UNAVAILABLE for all.
_RETRY_ON = "connect-failure,refused-stream,reset"


@dataclass(frozen=True)
class ProxyOptions(Options):
    """Options of proxy: where Envoy listens, and how much it lets through."""

    out: Path  # configuration file to write, for `envoy -c`
    listen: str = "127.0.0.1:8443"  # address and port; beyond loopback with --tls or --accept-risk
    tls: Path | None = None  # folder with tls.crt and tls.key; clients then have to use TLS
    # concurrent requests per server; more are refused
    in_flight: Annotated[int, Range(1, 100_000)] = 32
    # number of servers, if a name stands for several; 0: one per address
    replicas: Annotated[int, Range(0, 1000)] = 0
    # size limit of a request; larger ones are refused
    max_message_mib: Annotated[int, Range(1, 2047)] = 32
    # memory of the proxy, which buffers each request completely
    memory_mib: Annotated[int, Range(1, 1_000_000)] = 1024
    # time limit of a request, even if its caller sets a longer deadline
    longest_s: Annotated[int, Range(1, 86_400)] = 600
    ready_port: tuple[int, ...] = (8003,)  # readiness port: one for all servers, or one per server
    # readiness path; for a container /v2/health/ready on its HTTP port
    ready_path: Annotated[str, _READY_PATH] = "/ready"
    admin: Path | None = None  # socket for statistics and a graceful stop, open to this user only
    accept_risk: bool = False  # agree to listen beyond loopback without TLS
    force: bool = False  # replace an existing file at --out

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_mib < 4 * self.max_message_mib:
            raise SaccadeError(
                f"--memory-mib: found {self.memory_mib}, expected room for four messages of "
                f"{self.max_message_mib} MiB. Pass at least {4 * self.max_message_mib}, or a "
                "smaller --max-message-mib."
            )


@dataclass(frozen=True)
class Proxy:
    """A written configuration, and the command that runs it."""

    file: Path
    listen: str
    servers: tuple[str, ...]
    in_flight: int
    max_message_mib: int

    @property
    def command(self) -> tuple[str, ...]:
        """The command that runs Envoy with this configuration."""
        # When Envoy is told to stop, it answers pending requests within the drain time.
        drain = ("--drain-time-s", "10", "--drain-strategy", "immediate")
        return ("envoy", "-c", str(self.file), "--concurrency", "1", *drain)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "file": str(self.file), "command": list(self.command)}

    def to_text(self) -> str:
        """Return text for the terminal."""
        return (
            f"{self.file}: Envoy on {self.listen} in front of {', '.join(self.servers)}, "
            f"{self.in_flight} concurrent requests, messages of at most "
            f"{self.max_message_mib} MiB.\n"
            f"Run it with: {shlex.join(self.command)}"
        )


def proxy(servers: Sequence[str], options: ProxyOptions) -> Proxy:
    """Write the configuration of an Envoy proxy for servers, each given by its gRPC `HOST:PORT`.

    Raises: SaccadeError for an invalid address, port or file.
    """
    text = proxy_text(servers, options)
    write_atomically(options.out, text.encode(), replace=options.force)
    total = options.in_flight * (options.replicas or len(servers))
    return Proxy(options.out, options.listen, tuple(servers), total, options.max_message_mib)


def proxy_text(servers: Sequence[str], options: ProxyOptions) -> str:
    """Return the configuration as text.

    Raises: as `proxy`.
    """
    count = options.replicas or len(servers)
    host, port = _address("--listen", options.listen)
    template = resources.files("saccade.serving.server") / "envoy.yaml"
    return Template(template.read_text()).substitute(
        host=host,
        port=port,
        admin=_admin(options.admin),
        transport=_transport(host, options),
        heap_bytes=options.memory_mib * MIB,
        message_bytes=options.max_message_mib * MIB,
        longest_s=options.longest_s,
        # With a single server, retrying a refusal would only ask the same busy server again.
        retry_on=_RETRY_ON + (",unavailable,retriable-headers" if count > 1 else ""),
        in_flight=options.in_flight * count,
        in_flight_each=options.in_flight,
        ready_path=options.ready_path,
        endpoints=_endpoints(servers, options),
    )


def _endpoints(servers: Sequence[str], options: ProxyOptions) -> str:
    if not servers:
        raise SaccadeError("Found no server, expected one or more gRPC addresses, HOST:PORT.")
    if len(set(servers)) < len(servers):
        raise SaccadeError(f"{', '.join(servers)}: found a server twice. Pass each once.")
    ports = options.ready_port
    if len(ports) not in (1, len(servers)):
        raise SaccadeError(
            f"--ready-port: found {len(ports)} values for {len(servers)} servers, expected one for "
            "all, or one per server in the same order."
        )
    lines = []
    for server, ready in zip(servers, ports * (len(servers) // len(ports)), strict=True):
        host, port = _address("server", server)
        check = f"{{ port_value: {_port('--ready-port', str(ready))} }}"
        address = f"{{ socket_address: {{ address: {host}, port_value: {port} }} }}"
        lines.append(f"- endpoint: {{ address: {address}, health_check_config: {check} }}")
    return "\n".join(" " * 14 + line for line in lines)


def _address(of: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise SaccadeError(
            f"{of} {text!r:.80} is not an address. Pass HOST:PORT, where HOST is a name or an IPv4 "
            "address."
        )
    return host, _port(f"{of} {text}:", port)


def _port(of: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise SaccadeError(f"{of} {text!r:.20} is not a port. Pass 1 to 65535.")
    return int(text)


def _transport(host: str, options: ProxyOptions) -> str:
    """Return the TLS settings of the one filter chain."""
    if options.tls is None:
        if not is_loopback(host) and not options.accept_risk:
            raise SaccadeError(
                f"--listen {options.listen}: other machines could reach the proxy there without "
                "TLS. Pass --tls with a folder that contains tls.crt and tls.key, or --accept-risk "
                "if something else terminates TLS."
            )
        return ""
    names = options.tls / "tls.crt", options.tls / "tls.key"
    if missing := [name.name for name in names if not name.is_file()]:
        raise SaccadeError(
            f"--tls {options.tls}: found no {' and no '.join(missing)}, expected tls.crt and "
            "tls.key. docs/production.md shows how to make both for a test."
        )
    certificate, key = ({"filename": str(name.absolute())} for name in names)
    context = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificates": [{"certificate_chain": certificate, "private_key": key}],
    }
    kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    config = {"@type": kind, "common_tls_context": context}
    return (
        "          transport_socket:\n            name: envoy.transport_sockets.tls\n"
        f"            typed_config: {json.dumps(config)}"
    )


def _admin(socket: Path | None) -> str:
    """Return the admin settings: a socket that only this user can open, or nothing."""
    if socket is None:
        return ""
    path = str(socket.absolute())
    if len(path.encode()) > LONGEST_SOCKET:
        raise SaccadeError(
            f"--admin {socket}: found an absolute path of {len(path.encode())} bytes, expected at "
            f"most {LONGEST_SOCKET}, the system's limit for a socket. Pass a shorter path."
        )
    return f"admin: {{ address: {{ pipe: {{ path: {json.dumps(path)}, mode: 384 }} }} }}"
