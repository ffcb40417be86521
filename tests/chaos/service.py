# SPDX-License-Identifier: Apache-2.0
"""`saccade serve` in a separate process, as a user runs it, with its own temporary folder.

It is only observed from outside: addresses from its output, state from `/ready`, and processes from
the kernel's table.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from chaos.processes import Watch
from saccade.serving.server.addresses import ServeOptions

START_S = 120
DESCRIPTORS = 1024  # the usual soft limit of a login shell
_PORTS = ("--grpc-port", "--http-port", "--metrics-port", "--ready-port")


class ServiceFailed(Exception):
    """The service did not start; the message is its output."""


class Service:
    """A context manager: the service is ready when the block starts and gone when it ends.

    Units: start_s is how long it took to become ready, which measures this machine's speed.
    """

    def __init__(self, repository: Path, *options: str, wrap: Sequence[str] = ()) -> None:
        self.repository = repository
        self._options, self._wrap = options, wrap
        self.start_s = 0.0
        self.grpc = self.http = self.ready_url = ""
        self.exit_code: int | None = None

    def __enter__(self) -> "Service":
        self.place = Path(tempfile.mkdtemp(prefix="saccade-chaos-"))
        self.temporary = self.place / "tmp"
        self.temporary.mkdir()
        self.said = self.place / "stderr"
        began = time.monotonic()
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*self._wrap, *serve_command(self.repository, *self._options)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
                preexec_fn=_usual_limits,
            )  # fmt: skip
        self.watch = Watch(self.process.pid)
        try:
            self._read_addresses(began + START_S)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - began
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stop(self, within_s: float = 60) -> int | None:
        """Stop it as a service manager does; return its exit code, None if it had to be killed."""
        if self.exit_code is None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.exit_code

    def leftovers(self) -> list[str]:
        """Return its leftovers: processes, shared memory, run folders."""
        processes = [
            f"process {process.program} {process.model}" for process in self.watch.living()
        ]
        regions = [f"shared memory {path.name}" for path in self.watch.regions if path.exists()]
        folders = [f"folder {path.name}" for path in self.temporary.iterdir()]
        return [text.strip() for text in (*processes, *regions, *folders)]

    def leftovers_after(self, within_s: float) -> list[str]:
        """Return the leftovers that still exist after at most this time."""
        end = time.monotonic() + within_s
        while (left := self.leftovers()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def ready(self) -> bool:
        """Return the answer of `/ready`; False if nothing answers."""
        try:
            with urllib.request.urlopen(self.ready_url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def servers_begun(self) -> int:
        """Return the number of server processes so far."""
        return len(self.watch.servers())

    def last_words(self, lines: int = 12) -> str:
        """Return the end of its output."""
        return "\n".join(self.said.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Kill everything that is left and remove all files."""
        self.stop(within_s=20)
        for process in self.watch.living():
            process.kill(signal.SIGKILL)
        self.watch.close()
        for region in self.watch.regions:
            region.unlink(missing_ok=True)
        shutil.rmtree(self.place, ignore_errors=True)

    def _read_addresses(self, end: float) -> None:
        while time.monotonic() < end:
            text = self.said.read_text(errors="replace")
            if ready := re.search(r"ready: (http://\S+)", text):
                self.ready_url = ready[1]
                self.grpc = re.search(r"gRPC (\S+)", text)[1]
                http = re.search(r"HTTP http://([\d.]+:\d+)", text)
                self.http = http[1] if http else ""
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise ServiceFailed(f"saccade serve did not start:\n{self.last_words()}")


def serve_command(repository: Path, *options: str) -> list[str]:
    """Return the command line; it uses free ports unless `options` has others, with HTTP on."""
    given = [option for option in options if option != "--no-http"]
    command = [sys.executable, "-m", "saccade", "serve", str(repository), *given]
    for flag in _PORTS:
        if flag not in options:
            command += [flag, "0"]
    if any(field.name == "http" for field in fields(ServeOptions)) and "--no-http" not in options:
        command.append("--http")
    return command


def _usual_limits() -> None:
    # A shell with a higher limit would hide what most users experience.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(DESCRIPTORS, hard), hard))
