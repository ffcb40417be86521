# SPDX-License-Identifier: Apache-2.0
"""The addresses and ports that the server listens on: which are free, and who listens there."""

import ctypes
import errno
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from saccade.core.errors import SaccadeError
from saccade.core.options import Options, flag
from saccade.core.schema import NonNegative, Positive, Range

Port = Annotated[int, Range(0, 65535)]
SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K
_LISTEN, _ESTABLISHED = "0A", "01"
_TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}

PORTS = ("grpc_port", "http_port", "metrics_port", "ready_port", "openai")


@dataclass(frozen=True)
class ServeOptions(Options):
    """Options of serve: where it listens, and what follows a failure. Port 0 takes a free one."""

    host: str = "127.0.0.1"  # address to listen on; --accept-risk is needed beyond loopback
    grpc_port: Port = 8001  # port for inference over gRPC
    http: bool = False  # also serve HTTP, where one large request can crash it (docs/serving.md)
    http_port: Port = 8000  # port for inference over HTTP, with --http
    metrics_port: Port = 8002  # port for Prometheus metrics
    ready_port: Port = 8003  # port where GET /ready returns 200 or 503
    # also answer clients of OpenAI's API on this port: /v1/embeddings and others
    openai: Port | None = None
    # file with a key per line; callers of --openai must send one (required beyond loopback)
    openai_key_file: Path | None = None
    # seconds without progress after which a start has failed; ten times as long with progress
    start_timeout_s: Positive = 60
    probe_interval_s: Positive = 5  # seconds between two test inferences of each variant
    # seconds for a variant to answer a test inference, if its pace does not allow more
    probe_timeout_s: Positive = 2
    # seconds for a server that ends to finish calls in flight, if its pace does not allow more
    grace_s: NonNegative = 30
    server_log: Path | None = None  # file for the server's own, unprocessed log
    log_format: Literal["text", "json"] = "text"  # format of the log on standard error
    # restart a server that fails; --no-restart: exit with code 3 when the server fails
    restart: bool = True
    accept_risk: bool = False  # agree to listen beyond loopback
    # start Envoy in front of the server, which refuses requests that would wait too long
    proxy: bool = False
    # concurrent requests that the proxy passes on; more are refused; 0: a run batch for each core
    in_flight: Annotated[int, Range(0, 100_000)] = 0

    groups: ClassVar[Mapping[str, str]] = {
        "address": "host grpc_port http http_port metrics_port ready_port accept_risk",
        "API": "openai openai_key_file",
        "proxy": "proxy in_flight",
        "supervision": "start_timeout_s probe_interval_s probe_timeout_s grace_s restart",
        "log": "server_log log_format",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proxy and self.http:
            raise SaccadeError(
                "--proxy and --http: found both, expected one of them. The proxy passes on gRPC "
                "only, and HTTP callers would go past its limits. Drop --http, or put docker/proxy "
                "in front of it."
            )
        if self.in_flight and not self.proxy:
            raise SaccadeError(
                f"--in-flight {self.in_flight}: only the proxy limits requests. Add --proxy, or "
                "drop the option."
            )


def with_ports(options: ServeOptions) -> ServeOptions:
    """Return the options with every port 0 replaced by a free port, and check the other ports.

    A host name is replaced by its address; otherwise each protocol would resolve it separately.
    Raises: SaccadeError that names a port in use and the flag that changes it.
    """
    names = listening(options)
    options = replace(options, host=numeric(options.host))
    held: list[socket.socket] = []
    chosen: dict[str, int] = {}
    try:
        # Hold all ports until the last one is found, so that no two are the same.
        for name in sorted(names, key=lambda name: getattr(options, name) == 0):
            listener = _bind(options.host, getattr(options, name), name, chosen)
            held.append(listener)
            chosen[name] = listener.getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return replace(options, **chosen)  # type: ignore[arg-type]


def listening(options: ServeOptions) -> tuple[str, ...]:
    """Return the option fields of the ports that the server and the processes beside it use.

    Raises: SaccadeError for an HTTP port if HTTP is off.
    """
    if not options.http and options.http_port not in (0, ServeOptions.http_port):
        raise SaccadeError(
            f"--http-port {options.http_port}: HTTP is off. Pass --http to turn it on (Python: "
            "ServeOptions(http=True)), or drop the port and call over gRPC."
        )
    off = () if options.http else ("http_port",)
    return tuple(name for name in PORTS if name not in off and getattr(options, name) is not None)


def address(host: str, port: int) -> str:
    """Return `host:port` as a client on this machine uses it."""
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def numeric(host: str) -> str:
    """Return the address of a host name.

    Raises: SaccadeError if it has none.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise SaccadeError(
            f"--host {host}: found neither an IPv4 address nor a known host name ({error}). Pass "
            "an address of this machine, or drop the option for 127.0.0.1."
        ) from error


def _bind(host: str, port: int, name: str, chosen: dict[str, int]) -> socket.socket:
    refuse_shared(name, port, chosen)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Like the server, treat a port that only has connections in TIME_WAIT as free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise SaccadeError(
                f"--host {host}: this machine has no such address ({error.strerror}). "
                "Pass one of its addresses, or drop the option for 127.0.0.1."
            ) from error
        raise port_in_use(host, port, flag(name), error) from error
    return listener


def port_in_use(host: str, port: int, flag: str, error: OSError) -> SaccadeError:
    """Return the refusal of a port that cannot be used, which `flag` sets."""
    return SaccadeError(
        f"Port {port} on {host} cannot be used ({error.strerror}). Stop the process that is "
        f"using it (`ss -ltnp` shows it), or choose another port with {flag} (0 takes a free one)."
    )


def refuse_shared(name: str, port: int, chosen: Mapping[str, int]) -> None:
    """Refuse a port that another option has.

    Raises: SaccadeError that names both options.
    """
    for other, taken in chosen.items():
        if taken == port:
            raise SaccadeError(
                f"{flag(name)} and {flag(other)} are both {port}, expected different ports. "
                "Change one of them."
            )


@dataclass(frozen=True)
class Socket:
    """One TCP socket on this machine."""

    family: socket.AddressFamily
    host: str
    port: int
    inode: str


def listeners(port: int) -> list[Socket]:
    """Return the sockets that listen on a port."""
    return _sockets(port, _LISTEN)


def own(sockets: Iterable[Socket], pid: int) -> list[Socket]:
    """Return the sockets that a process of this user has open."""
    inodes = _inodes_of(pid)
    return [one_socket for one_socket in sockets if one_socket.inode in inodes]


def connections(port: int, pid: int) -> int:
    """Return the number of callers connected to a process on a port."""
    return len(own(_sockets(port, _ESTABLISHED), pid))


def send_callers_to(sockets: list[Socket], index: int) -> None:
    """Send new connections on the port of these sockets to the socket with this index.

    Indices follow the order in which the sockets started to listen. If there is no socket with the
    index, all sockets share the connections.
    Raises: OSError if the kernel does not support it.
    """
    first = sockets[0]
    with socket.socket(first.family, socket.SOCK_STREAM) as member:
        if first.family == socket.AF_INET6:
            member.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        member.bind((first.host, first.port))
        # Only a member of the group may attach the program; it stays when that member leaves.
        member.listen(1)
        instruction = struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, index)
        kept = ctypes.create_string_buffer(instruction)
        program = struct.pack("HP", 1, ctypes.addressof(kept))
        member.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


def _sockets(port: int, state: str) -> list[Socket]:
    sockets = []
    for table, family in _TABLES.items():
        with suppress(OSError), Path(table).open(encoding="ascii") as lines:
            next(lines)
            for line in lines:
                words = line.split()
                host, _, number = words[1].partition(":")
                if words[3] == state and int(number, 16) == port:
                    sockets.append(Socket(family, _host(host, family), port, words[9]))
    return sockets


def _host(text: str, family: socket.AddressFamily) -> str:
    # The kernel prints each word of an address in the machine's byte order.
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


def _inodes_of(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes
