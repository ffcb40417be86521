# SPDX-License-Identifier: Apache-2.0
"""The committed proxy before the embedded server: TLS, a cap on messages, a list of what passes."""

import http.client
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from saccade.serving import client as client_module
from saccade.serving.client import Client

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docker" / "proxy"
DOCUMENT = ROOT / "docs" / "production.md"
NOBODY = 65534
MIB = 2**20
INFER = "/v2/models/nac/infer"


@dataclass(frozen=True)
class Proxy:
    """Where it listens and whom to trust."""

    port: int
    certificate: Path

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def grpc(self) -> InferenceServerClient:
        return InferenceServerClient(self.url, ssl=True, root_certificates=str(self.certificate))

    def http(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=self.certificate)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=10, context=context
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(
                method,
                path,
                body,
                named,
                encode_chunked=named.get("transfer-encoding") == "chunked",
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def start(eventually_ready: Callable[..., None]) -> Callable[..., Any]:
    """Start nginx without privileges, with the committed files but for addresses and the cap."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed (Debian, Ubuntu: apt-get install nginx-light)")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, with which the certificate is made")

    @contextmanager
    def run(grpc_port: int, http_port: int) -> Iterator[Proxy]:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lay_out(folder, port, grpc_port, http_port)
            command = [nginx, "-e", "stderr", "-p", f"{folder}/run/", "-c", folder / "nginx.conf"]
            root = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root() else {}
            with (folder / "run" / "log").open("r+") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, **root)
            try:
                eventually_ready(port, process, folder / "run" / "log")
                yield Proxy(port, folder / "tls" / "tls.crt")
            finally:
                process.terminate()
                process.wait(10)

    return run


@pytest.fixture(scope="module")
def eventually_ready() -> Callable[..., None]:
    def wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        for _ in range(200):
            if process.poll() is not None:
                pytest.fail(f"nginx ended with {process.returncode}: {log.read_text()}")
            with socket.socket() as probe:
                probe.settimeout(0.05)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        pytest.fail(f"nginx does not listen: {log.read_text()}")

    return wait


def lay_out(folder: Path, port: int, grpc_port: int, http_port: int) -> None:
    for name in ("place", "tls", "run"):
        (folder / name).mkdir()
    (folder / "nginx.conf").write_bytes((COMMITTED / "nginx.conf").read_bytes())
    changes = {
        "saccade-server:8001": f"127.0.0.1:{grpc_port}",
        "saccade-server:8000": f"127.0.0.1:{http_port}",
        "client_max_body_size 32m": "client_max_body_size 1m",
        "listen 8443": f"listen 127.0.0.1:{port}",
    }
    texts = {file.name: file.read_text() for file in (COMMITTED / "place").glob("*.conf")}
    for old, new in changes.items():
        assert sum(text.count(old) for text in texts.values()) == 1, old
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (folder / "place" / name).write_text(text)
    shown = re.search(r"^openssl req .*?[^\\]$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    line = shown[0].replace("\\\n", " ").replace("build/tls", str(folder / "tls"))
    subprocess.run(shlex.split(line), check=True, capture_output=True)
    (folder / "run" / "log").touch()
    folder.chmod(0o755)
    if is_root():
        for path in (*folder.rglob("*"), folder / "run"):
            os.chown(path, NOBODY, NOBODY)


def is_root() -> bool:
    return os.geteuid() == 0


@pytest.fixture(scope="module")
def proxy(start, server) -> Iterator[Proxy]:
    with start(server.options.grpc_port, server.options.http_port) as running:
        yield running


@pytest.fixture
def through(proxy, server, monkeypatch) -> Iterator[Client]:
    """The client as it is, over TLS."""
    monkeypatch.setattr(client_module, "connect", lambda url: proxy.grpc())
    with Client(proxy.url, server.model) as connected:
        yield connected


def ask(connection: InferenceServerClient, payload: bytes, **named: Any) -> Any:
    tensor = InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[payload]], dtype=np.object_))
    return connection.infer("nac", [tensor], **named)


def status_of(call: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as error:
        call()
    return str(error.value.status()).removeprefix("StatusCode.")


def test_the_client_is_answered_over_tls(through, client, digit):
    assert through.classify([digit, digit], top=2) == client.classify([digit, digit], top=2)
    np.testing.assert_array_equal(
        through.infer({"image": [digit]}, budget=0.5)["logits"],
        client.infer({"image": [digit]}, budget=0.5)["logits"],
    )


def test_the_documents_client_is_answered(proxy, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for shown, here in (
        ("localhost:8443", f"localhost:{proxy.port}"),
        ("build/tls/tls.crt", str(proxy.certificate)),
        ("docs/examples/seven.png", str(ROOT / "docs/examples/seven.png")),
    ):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    exec(compile(code, str(DOCUMENT), "exec"), {})
    assert "nac-b0250-fp32" in capsys.readouterr().out


def handshake(proxy: Proxy, context: ssl.SSLContext) -> str | None:
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as plain:
        with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
            return wrapped.version()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_only_tls_of_today_is_spoken(proxy):
    context = ssl.create_default_context(cafile=proxy.certificate)
    assert handshake(proxy, context) == "TLSv1.3"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(proxy, context) == "TLSv1.2"
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        handshake(proxy, context)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(proxy, ssl.create_default_context())
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 400


def test_a_message_over_the_cap_is_refused_and_the_server_lives(proxy, server, through, digit):
    pid = server.pid
    over, under = b"x" * (3 * MIB), b"x" * (MIB // 2)
    with proxy.grpc() as connection, InferenceServerClient(server.url) as direct:
        assert status_of(lambda: ask(connection, over)) == "RESOURCE_EXHAUSTED"
        # Without the proxy, or under its cap, it is the router that says that this is no image.
        assert status_of(lambda: ask(direct, over)) == "INVALID_ARGUMENT"
        assert status_of(lambda: ask(connection, under)) == "INVALID_ARGUMENT"
    status, said = proxy.http("POST", INFER, over)
    assert status == 413 and b"larger" in said
    parts = [over[:MIB]] * 3
    assert proxy.http("POST", INFER, iter(parts), transfer_encoding="chunked")[0] == 413
    assert proxy.http("POST", INFER, under)[0] in (400, 500)
    assert server.pid == pid and len(through.classify([digit])) == 1


def test_only_so_many_messages_are_taken_at_once(proxy, eventually):
    context = ssl.create_default_context(cafile=proxy.certificate)
    begun = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode()
    with ExitStack() as stack:
        for _ in range(32):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), 5))
            stack.enter_context(context.wrap_socket(plain, server_hostname="localhost")).send(begun)
        eventually(lambda: proxy.http("GET", "/v2")[0] == 503, 5)
        with proxy.grpc() as connection:
            assert status_of(lambda: ask(connection, b"x")) == "UNAVAILABLE"
    eventually(lambda: proxy.http("GET", "/v2")[0] == 200, 5)


def test_what_is_packed_is_refused(proxy):
    with proxy.grpc() as connection:
        packed = status_of(lambda: ask(connection, b"x", compression_algorithm="gzip"))
        assert packed == "UNIMPLEMENTED"
    assert proxy.http("POST", INFER, b"x", content_encoding="gzip")[0] == 415
    assert proxy.http("POST", INFER, b"x", content_encoding="identity")[0] in (400, 500)


@pytest.mark.parametrize(
    "path",
    [
        "/metrics", "/v2/models/stats", "/v2/models/nac/stats", "/v2/models/nac/generate",
        "/v2/repository/index", "/v2/repository/models/nac/unload", "/v2/logging",
        "/v2/trace/setting", "/v2/models/nac/trace/setting", "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/status", "/v2/models/nac/../../repository/index",
        "/v2/models/nac/%2e%2e/%2e%2e/repository/index", "/v2/models/stats/../nac/ready",
        "//v2", "/v2?x=1", "/",
    ],
)  # fmt: skip
def test_what_is_not_for_clients_does_not_pass(proxy, path):
    for method in ("GET", "POST"):
        assert proxy.http(method, path)[0] in (400, 404)


def test_what_clients_need_passes(proxy, server):
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/nac"):
        assert proxy.http("GET", path)[0] == 200
    for variant in server.variants:
        assert proxy.http("GET", f"/v2/models/{variant}/ready")[0] == 200
    assert proxy.http("GET", "/v2/models/nac/config")[0] == 200


def test_methods_for_administration_do_not_pass(proxy):
    with proxy.grpc() as connection:
        assert connection.is_server_ready() and connection.is_model_ready("nac")
        for call in (
            connection.get_model_repository_index,
            connection.get_system_shared_memory_status,
            connection.get_cuda_shared_memory_status,
            connection.get_log_settings,
            connection.get_trace_settings,
            connection.get_inference_statistics,
            lambda: connection.load_model("nac"),
        ):
            assert status_of(call) == "UNIMPLEMENTED"


def test_a_server_that_is_gone_is_unavailable(start):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        nobody = holder.getsockname()[1]
    with start(nobody, nobody) as lonely:
        with lonely.grpc() as connection:
            assert status_of(lambda: ask(connection, b"x")) == "UNAVAILABLE"
        assert lonely.http("GET", "/v2/health/ready")[0] == 502
