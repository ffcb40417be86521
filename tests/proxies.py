# SPDX-License-Identifier: Apache-2.0
"""The committed nginx configuration in a separate process, in front of local servers."""

import http.client
import os
import re
import shlex
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_ports import free_port, wait_until_it_listens
from tritonclient.grpc import InferenceServerClient

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "docker" / "proxy"
DOCUMENT = ROOT / "docs" / "production.md"
NOBODY = 65534


@dataclass(frozen=True)
class Proxy:
    """A running proxy: its address and its certificate."""

    port: int
    certificate: Path
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def grpc(self) -> InferenceServerClient:
        return InferenceServerClient(self.url, ssl=True, root_certificates=str(self.certificate))

    def http(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=self.certificate)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=context
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


def nginx_or_skip() -> str:
    """Return the program, or skip the test."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed (Debian, Ubuntu: apt-get install nginx-light)")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, but the certificate needs it")
    return nginx


@contextmanager
def running(grpc_port: int, http_port: int) -> Iterator[Proxy]:
    """Start nginx without privileges, with the committed files except addresses and limits."""
    nginx = nginx_or_skip()
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, port, grpc_port, http_port)
        command = [nginx, "-e", "stderr", "-p", f"{folder}/run/", "-c", folder / "nginx.conf"]
        root = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root() else {}
        with (folder / "run" / "log").open("r+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **root)
        try:
            wait_until_it_listens(port, process, folder / "run" / "log")
            yield Proxy(port, folder / "tls" / "tls.crt", process)
        finally:
            process.terminate()
            process.wait(10)


def lay_out(folder: Path, port: int, grpc_port: int, http_port: int) -> None:
    """Write the proxy's files."""
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
    """True if nginx would run with privileges."""
    return os.geteuid() == 0
