# SPDX-License-Identifier: Apache-2.0
"""The installed Prometheus and promtool; Debian has both, PyPI has neither."""

import json
import shutil
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
from local_ports import free_port


def program_or_skip(name: str) -> str:
    """Return the path of `prometheus` or `promtool`, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian, Ubuntu: apt-get install prometheus)")
    return found


def promtool(*arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run promtool, with text on its standard input."""
    command = [program_or_skip("promtool"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True)


class Prometheus:
    """A running server, with its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each current sample of an expression."""
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
    """Start Prometheus with a configuration; its data and log go into `place`."""
    program = program_or_skip("prometheus")
    port = free_port()
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
