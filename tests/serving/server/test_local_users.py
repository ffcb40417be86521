# SPDX-License-Identifier: Apache-2.0
"""Secrets of a running server that other users of the machine, and callers, cannot reach."""

import re
import socket
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from saccade.model_repository.router.routes import RUN_FOLDER
from saccade.serving.server import beside
from saccade.serving.server import process as server_process
from saccade.serving.server.run_folder import SHARED_MEMORY

grpc = pytest.importorskip("tritonclient.grpc")


HEADER, VALUE = server_process.CLOSED.split("=")
PREFIX = "triton-grpc-protocol-"  # which the server puts before a header's name
INHERITED = """
import os, resource, sys
os.umask(before := os.umask(0))
file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o644)
os.fchmod(file, 0o644)
print(oct(before), oct(os.fstat(file).st_mode & 0o777), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.fixture(scope="module")
def command_line(server) -> str:
    """Command line that everyone on the machine can read."""
    return Path(f"/proc/{server.pid}/cmdline").read_text().replace("\0", "\n")


@pytest.fixture(scope="module")
def regions(command_line) -> list[Path]:
    """The server's own shared memory, in which callers' images are."""
    prefix = re.search(r"shm-region-prefix-name=(.+)", command_line)
    return list(SHARED_MEMORY.glob(f"{prefix[1]}*"))


def test_a_program_inherits_umask_modes_and_descriptors(tmp_path):
    limited = (sys.executable, "-IS", beside.__file__, "limited")
    program = (sys.executable, "-c", INHERITED, str(tmp_path / "file"))
    done = subprocess.run(
        ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash", *limited, *program],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    umask, mode, soft, hard = done.stdout.split()
    assert (umask, mode) == ("0o77", "0o600")
    assert soft == hard != "256"


def test_images_and_files_of_a_run_are_its_users_alone(server, command_line, regions):
    assert len(regions) >= 1 + len(server.variants)
    assert {stat.S_IMODE(region.stat().st_mode) for region in regions} == {0o600}
    folder = Path(re.search(r"--model-repository=(.+)", command_line)[1]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "\nUmask:\t0077\n" in Path(f"/proc/{server.pid}/status").read_text()
    limits = Path(f"/proc/{server.pid}/limits").read_text()
    soft, hard = re.search(r"Max open files +(\d+) +(\d+)", limits).groups()
    assert soft == hard


def test_the_command_line_has_no_secret(command_line):
    closed = re.findall(r"restricted-\w+=(.+)", command_line)
    assert len(closed) == 2
    assert all(each.endswith(f":{server_process.CLOSED}") for each in closed)
    assert not re.search("[0-9a-f]{32}", command_line)


def register(region: Path) -> bytes:
    message = grpc.service_pb2.SystemSharedMemoryRegisterRequest(
        name="own", key=f"/{region.name}", byte_size=64
    )
    return message.SerializeToString()


@pytest.mark.parametrize(
    "method",
    ["SystemSharedMemoryRegister", "SystemSharedMemoryStatus", "RepositoryIndex",
     "RepositoryModelUnload", "LogSettings", "TraceSetting"],
)  # fmt: skip
@pytest.mark.parametrize(
    "header",
    ["", HEADER, f"{PREFIX}{HEADER}", f"{PREFIX}{HEADER.upper()}",
     f"{PREFIX}{HEADER.partition(':')[0]}", f"{PREFIX}x-saccade-admin"],
)  # fmt: skip
def test_administration_is_closed_over_grpc(server, regions, method, header):
    message = register(regions[0]) if method == "SystemSharedMemoryRegister" else b""
    headers = {header: VALUE} if header else {}
    said = raw_call(server.options.grpc_port, method, message, **headers)
    refused = b"is restricted" in said or b"Missing :method header" in said
    assert refused and status_of(said) in (2, 14)


def test_the_raw_call_can_succeed(server):
    said = raw_call(server.options.grpc_port, "ServerLive")
    assert status_of(said) == 0


def test_the_servers_own_memory_is_no_callers_memory(server, client, digit, regions):
    """The chain of CVE-2025-23319, 23320 and 23334: its second and third link."""
    variant, pid = server.variants[0], server.pid
    for name in ("own", regions[0].name, f"/{regions[0].name}"):
        given = grpc.InferInput("image", [1, *digit.shape], "UINT8")
        given.set_shared_memory(name, digit.nbytes)
        wanted = grpc.InferRequestedOutput("logits")
        wanted.set_shared_memory(name, 64)
        with grpc.InferenceServerClient(server.url) as connection:
            for call in (
                lambda named=name: connection.register_system_shared_memory(named, named, 64),
                lambda tensor=given: connection.infer(variant, [tensor]),
                lambda output=wanted: connection.infer(variant, [whole(digit)], outputs=[output]),
            ):
                with pytest.raises(grpc.InferenceServerException) as refused:
                    call()
                said = refused.value.message()
                assert "restricted" in said or "Unable to find shared memory region" in said
                assert not any(region.name in said.replace(name, "") for region in regions)
    assert server.pid == pid and len(client.classify([digit])) == 1


def whole(digit):
    given = grpc.InferInput("image", [1, *digit.shape], "UINT8")
    given.set_data_from_numpy(digit[None])
    return given


GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService"


def raw_call(port: int, method: str, message: bytes = b"", **headers: str) -> bytes:
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
        while status_of(received) is None and (more := connection.recv(65536)):
            received += more
    return received


def status_of(said: bytes) -> int | None:
    """Return the gRPC status code at the end of an answer, or None."""
    match = re.search(rb"grpc-status[\x01\x02](\d+)", said)
    return int(match[1]) if match else None


def _literal(name: str, value: str) -> bytes:
    words = name.encode(), value.encode()
    return b"\x10" + b"".join(bytes([len(word)]) + word for word in words)


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    size = struct.pack(">I", len(content))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + content


def test_the_router_knows_a_folder_that_outlives_its_process(server):
    """There it keeps the evidence against policies; a reloaded model has another folder."""
    environ = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
    folder = Path(re.search(rf"{RUN_FOLDER}=([^\0]+)", environ)[1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "lock").exists()
