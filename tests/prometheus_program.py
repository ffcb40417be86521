# SPDX-License-Identifier: Apache-2.0
"""Prometheus and its promtool as they are installed; Debian has both, PyPI neither."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def program_or_skip(name: str) -> str:
    """Path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian, Ubuntu: apt-get install prometheus)")
    return found


def promtool(*arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """What promtool says, with a text on its standard input."""
    command = [program_or_skip("promtool"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True)


class Prometheus:
    """A running server, to be asked over its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample that an expression has now."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in found]

    def ready(self) -> bool:
        """True if it answers."""
        try:
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=10).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


@contextmanager
def running(config: Path, place: Path) -> Iterator[Prometheus]:
    """Start Prometheus on a configuration; its data and its log go into `place`."""
    program = program_or_skip("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    with (place / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(program, f"--config.file={config}", f"--storage.tsdb.path={place / 'data'}"),
                *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        served = Prometheus(port)
        end = time.monotonic() + 60
        while not served.ready():
            assert process.poll() is None, (place / "prometheus.log").read_text()
            assert time.monotonic() < end, "Prometheus does not answer"
            time.sleep(0.05)
        yield served
    finally:
        process.terminate()
        process.wait()
