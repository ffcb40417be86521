# SPDX-License-Identifier: Apache-2.0
"""Processes that listen on a shared port, and the choice of the one that gets new connections.

With SO_REUSEPORT, the kernel distributes new connections over all sockets that listen on the port.
A program of one instruction, attached to that group of sockets, selects one of them instead. A
second server can therefore listen next to the first without getting callers too early.
"""

import ctypes
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN_CONSTANT = 0x06  # BPF_RET | BPF_K
_LISTEN, _ESTABLISHED = "0A", "01"
_TABLES = {"/proc/net/tcp": socket.AF_INET, "/proc/net/tcp6": socket.AF_INET6}


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
