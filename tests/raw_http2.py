# SPDX-License-Identifier: Apache-2.0
"""Make a gRPC call as bytes on a socket, with headers that no library would send."""

import re
import socket
import struct
from contextlib import suppress

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService"


def call(port: int, method: str, message: bytes = b"", **headers: str) -> bytes:
    """Return everything that the server sends within seconds, up to the call's status."""
    named = {
        ":method": "POST", ":scheme": "http", ":path": f"{SERVICE}/{method}", ":authority": "x",
        "content-type": "application/grpc", "te": "trailers", **headers,
    }  # fmt: skip
    head = b"".join(_literal(name, value) for name, value in named.items())
    body = b"\0" + struct.pack(">I", len(message)) + message
    received = b""
    with socket.create_connection(("127.0.0.1", port), 5) as connection, suppress(OSError):
        connection.sendall(GREETING + _frame(4, 0, 0) + _frame(1, 4, 1, head))
        connection.sendall(_frame(0, 1, 1, body))
        connection.settimeout(5)
        while status(received) is None and (more := connection.recv(65536)):
            received += more
    return received


def status(said: bytes) -> int | None:
    """Return the gRPC status code at the end of an answer, or None."""
    match = re.search(rb"grpc-status[\x01\x02](\d+)", said)
    return int(match[1]) if match else None


def _literal(name: str, value: str) -> bytes:
    words = name.encode(), value.encode()
    return b"\x10" + b"".join(bytes([len(word)]) + word for word in words)


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    size = struct.pack(">I", len(content))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + content
