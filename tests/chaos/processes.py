# SPDX-License-Identifier: Apache-2.0
"""The processes of one service as the kernel shows them: which live, which started, their memory.

This does not rely on saccade: a restart is a new process of the server.
"""

import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from saccade.core.machine import memory_mib

SERVER = "tritonserver"
STUB = "triton_python_backend_stub"
EVERY_S = 0.1
MEMORY_TURNS = 5
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process; `started` (clock ticks) distinguishes it from a later one with the same id."""

    pid: int
    started: int
    program: str
    parent: int
    model: str = ""  # the model, if it is a stub

    def lives(self) -> bool:
        """True if it still runs; a zombie does not."""
        fields = stat(self.pid)
        return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == self.started

    def kill(self, number: int) -> None:
        """Send a signal, unless the id belongs to another process by now."""
        if self.lives():
            os.kill(self.pid, number)


def process(pid: int) -> Process | None:
    """Return the process with this id, or None."""
    fields, words = stat(pid), command_of(pid)
    if not fields or not words or fields[0] in "ZX":
        return None
    program = Path(words[0]).name
    instances = [re.fullmatch(r"([a-z0-9-]+)_\d+_\d+", word) for word in words[2:]]
    models = [instance[1] for instance in instances if instance] if program == STUB else []
    return Process(pid, int(fields[19]), program, int(fields[1]), models[0] if models else "")


def command_of(pid: int) -> list[str]:
    """Return the words that a process was started with; none if it has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def descriptors(pid: int) -> int:
    """Return the number of open files and connections of a process."""
    try:
        return sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return 0


def regions_of(pid: int) -> set[Path]:
    """Return the shared memory that a process has mapped."""
    try:
        lines = (_PROC / str(pid) / "maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    return {Path(path.removesuffix(" (deleted)")) for path in paths}


class Watch:
    """Watches a process and its descendants many times per second from a separate thread.

    `seen` has every process that ever existed, so that one whose parent has died still counts.
    Units: memory is pairs of time.monotonic() and MiB.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.seen: dict[tuple[int, int], Process] = {}
        self.regions: set[Path] = set()
        self.memory: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def living(self) -> list[Process]:
        """Return the processes that run now, with any parent; the oldest first."""
        with self._lock:
            alive = {process.pid for process in self.seen.values() if process.lives()}
            for pid in below({self._root, *alive}):
                # Read again each time: a process may execute another program.
                if running := process(pid):
                    self.seen[running.pid, running.started] = running
            living = [process for process in self.seen.values() if process.lives()]
        return sorted(living, key=lambda each: each.started)

    def servers(self) -> list[Process]:
        """Return every process of the server so far.

        A child that is about to become a stub looks like the server for a moment.
        """
        with self._lock:
            servers = [process for process in self.seen.values() if process.program == SERVER]
        pids = {server.pid for server in servers}
        return [server for server in servers if server.parent not in pids]

    def stub(self, model: str) -> Process:
        """Return the process of a model; the newest if there are two."""
        return [process for process in self.living() if process.model == model][-1]

    def server(self) -> Process:
        """Return the server that runs now; the newest if there are two."""
        return [server for server in self.servers() if server.lives()][-1]

    def memory_mib(self) -> float:
        """Return the current memory of all of them."""
        return _sum_mib(self.living())

    def peak_mib(self) -> float:
        """Return the maximum memory so far."""
        return max((mib for _, mib in self.memory), default=0.0)

    def _run(self) -> None:
        turn = 0
        while not self._ended.wait(EVERY_S):
            living = self.living()
            if turn % MEMORY_TURNS == 0:
                self.regions |= {path for process in living for path in regions_of(process.pid)}
                self.memory.append((time.monotonic(), _sum_mib(living)))
            turn += 1


def _sum_mib(living: list[Process]) -> float:
    return sum(memory_mib(process.pid for process in living).values())


def below(roots: set[int]) -> set[int]:
    """Return these processes and their descendants, in one pass over the process table."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.glob("[0-9]*"):
        if fields := stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    below, ahead = set(roots), list(roots)
    while ahead:
        new = [pid for pid in children.get(ahead.pop(), ()) if pid not in below]
        below.update(new)
        ahead += new
    return below


def stat(pid: int) -> list[str]:
    """Return what the kernel says of a process after its name; nothing if it has ended."""
    # The name in parentheses may contain spaces and parentheses.
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
