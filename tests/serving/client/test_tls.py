# SPDX-License-Identifier: Apache-2.0
"""An address that begins with grpcs:// is asked over TLS, by both clients and the command line."""

import os
import subprocess
import sys
import threading
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

ASK = """
import asyncio, sys
from saccade.serving.client.connection import connect, connect_asyncio
async def ask():
    async with connect_asyncio(sys.argv[1]) as connection:
        return await connection.is_server_live()
with connect(sys.argv[1]) as connection:
    print(connection.is_server_live(), asyncio.run(ask()))
"""


class Lives(service_pb2_grpc.GRPCInferenceServiceServicer):
    def ServerLive(self, request, context):  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    """A port of a server that speaks TLS only, and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"),
        *("subjectAltName=DNS:localhost", "-keyout", folder / "key", "-out", folder / "crt"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed, with which the certificate is made")
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Lives(), server)
    pair = ((folder / "key").read_bytes(), (folder / "crt").read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port, folder / "crt"
    stopped: threading.Event = server.stop(0)
    stopped.wait(5)


# The authorities that gRPC trusts are read once a process: each case is a process of its own.
@pytest.mark.parametrize(
    "scheme, trusted, answered",
    [("grpcs://", True, True), ("grpcs://", False, False), ("", True, False)],
)
def test_the_certificate_has_to_be_trusted(over_tls, scheme, trusted, answered):
    port, certificate = over_tls
    own = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)} if trusted else {}
    done = subprocess.run(
        [sys.executable, "-c", ASK, f"{scheme}localhost:{port}"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip() == "True True") == answered, done.stderr


def test_the_command_line_explains_a_failed_handshake_without_grpc_s_log(over_tls):
    own = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    command = [
        sys.executable,
        "-m",
        "saccade",
        "doctor",
        "--url",
        f"grpcs://localhost:{over_tls[0]}",
    ]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    assert done.returncode == 3 and "the TLS handshake failed: the server may not use TLS" in said
    assert "ssl_transport_security" not in done.stderr
