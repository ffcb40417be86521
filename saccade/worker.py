# SPDX-License-Identifier: Apache-2.0
"""A process of its own for work that may end it, hang in it, or take all memory.

`Worker(module, request, limits)` starts `module.main(request, say)` in a new interpreter; what that
says comes back, an object a message. It dies with its parent. Limits are the system's own: nothing
that a foreign library does inside can lift them.
"""

import ctypes
import json
import math
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import IO, Any, cast

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 6

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """What a worker may use; none is no limit. With a niceness, others go first.

    Units: memory is of its address space; cpu_s is processor time between two messages.
    """

    memory_bytes: int | None = None
    cpu_s: int | None = None
    niceness: int = 0


class Worker:
    """One such process, for one request."""

    def __init__(self, module: str, request: dict[str, Any], limits: Limits) -> None:
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "saccade.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"},
            text=True,
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last_words: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        task = {"module": module, "request": request, "parent": os.getpid(), **asdict(limits)}
        stdin = cast(IO[str], self._process.stdin)
        try:
            stdin.write(json.dumps(task) + "\n")
            stdin.close()
        except BrokenPipeError:
            pass  # it died: `receive` finds the end of its output

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; none when the process has ended.

        Raises: TimeoutError if there is none in that time.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        return None if line is None else dict(json.loads(line))

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        if -code == signal.SIGXCPU:
            return f"more than {self._limits.cpu_s} s of CPU time"
        return f"killed by {signal.Signals(-code).name}"

    @property
    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        return " ".join(self._last_words[-2:])

    def close(self) -> None:
        """End the process, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_words = [*self._last_words[1 - _KEPT_LINES :], line.strip()[:400]]


def main() -> None:
    """Do what the parent asks for on standard input."""
    task = json.loads(sys.stdin.readline())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != task["parent"]:
        raise SystemExit("the parent ended before the work began")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(task["niceness"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (most := task["memory_bytes"]) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # What is loaded may print: only messages are written where the parent reads.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=lines)
        _allow(task["cpu_s"])

    _allow(task["cpu_s"])
    import_module(task["module"]).main(task["request"], say)


def _allow(cpu_s: int | None) -> None:
    if cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
