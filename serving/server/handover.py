# SPDX-License-Identifier: Apache-2.0
"""Handover from one server process to another on the same ports, without a failed call.

The second server listens next to the first, but gets no callers until it is loaded. Then all new
connections go to it. Connections to the first end at their maximum age, between calls, and are
opened again.
"""

import ctypes
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.server import process as server_process
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.log import SERVICE, report
from saccade.serving.server.process import ServerProcess, StartLimit
from saccade.serving.server.run_folder import RunFolder

Start = Callable[[RunFolder], ServerProcess]

SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K
_LISTEN, _ESTABLISHED = "0A", "01"
_TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}


class Replacement:
    """A requested second server, until it has taken over or failed."""

    def __init__(
        self, start: Start, model: str, variants: tuple[str, ...], repository: str
    ) -> None:
        """`repository` is its SHA-256."""
        self.start = start
        self.model = model
        self.variants = variants
        self.repository = repository
        self.process: ServerProcess | None = None
        self.failure: SaccadeError | None = None
        self.settled = threading.Event()

    def begin(self, folder: RunFolder) -> None:
        """Start it next to the first."""
        try:
            self.process = self.start(folder)
            self._limit = StartLimit(self.process.cpu_s)
        except (SaccadeError, OSError) as error:
            self.fail(f"The new server could not be started: {error}")

    def loaded(self, start_timeout_s: float) -> bool:
        """Return True once everything is loaded; fail if it has exited or takes too long.

        Units: start_timeout_s is the time without progress.
        """
        if self.process is None:
            return False
        if ended := self.process.exit_text():
            self.fail(f"The new server exited during its start ({ended}).")
        elif self.process.loaded():
            return True
        elif self._limit.is_over(start_timeout_s):
            self.fail(f"The new server was not ready {self._limit.text(start_timeout_s)}.")
        return False

    def fail(self, text: str) -> None:
        """Give up on it; the first server continues."""
        if self.process is not None:
            self.process.stop(at_once=True)
            self.process = None
        self.failure = ServerFailed(text)
        self.settled.set()


class Drain:
    """A server that gets no new callers, and is stopped when its last caller has left.

    Units: patience_s is the time for calls in flight, if that is longer than the options'.
    """

    def __init__(self, process: ServerProcess, options: ServeOptions, patience_s: float) -> None:
        self.process, self._patience_s = process, max(patience_s, options.grace_s)
        # gRPC spreads the ages of connections by a tenth.
        self._end_s = time.monotonic() + 1.1 * server_process.CONNECTION_AGE_S + self._patience_s

    def ended(self) -> bool:
        """Return True once it is gone; stop it when it has no callers or its time is up."""
        is_over = time.monotonic() > self._end_s
        count = 0 if self.process.exit_text() else callers(self.process)
        if count and not is_over:
            return False
        if count:
            noun = "connection" if count == 1 else "connections"
            text = f"Closing {count} {noun} to the old server."
            report(logging.WARNING, "connections_closed", text, connections=count)
        self.process.stop(at_once=not count)
        return True


def callers(process: ServerProcess) -> int:
    """Return the number of connections from callers to a process."""
    return sum(connections(port, process.pid) for port in process.ports())


def receive_callers(process: ServerProcess) -> None:
    """Send new connections to this server, even if others listen on its ports."""
    for port in process.ports():
        every = listening(port)
        mine = own(every, process.pid)
        if not mine:
            continue
        try:
            # The others started to listen earlier, so our sockets come after theirs.
            send_callers_to(mine, len(every) - len(mine))
        except OSError as error:
            SERVICE.debug("Port %d: callers go to all processes listening on it (%s).", port, error)


def foreign_listeners(process: ServerProcess) -> list[int]:
    """Return ports on which another process listens too, which the system allows the same user."""
    pids = []
    for port in process.ports():
        every = listening(port)
        if len(own(every, process.pid)) < len(every):
            pids.append(port)
    return pids


@dataclass(frozen=True)
class Socket:
    """One TCP socket on this machine."""

    family: socket.AddressFamily
    host: str
    port: int
    inode: str


def listening(port: int) -> list[Socket]:
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
