# SPDX-License-Identifier: Apache-2.0
"""Run a command in a child forked from a process that has already imported everything."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clock import Clock, Moment, clock
from commands import Command

NEVER = Moment("none", 0, "none")
_MOST_S = 1200.0


@dataclass(frozen=True)
class Place:
    """The folders of one trial."""

    root: Path

    @property
    def out(self) -> Path:
        """The folder of results."""
        return self.root / "out"

    @property
    def temporary(self) -> Path:
        """TMPDIR, which also identifies the processes of a trial."""
        return self.root / "tmp"

    def make(self) -> None:
        """Create the empty folders."""
        self.out.mkdir(parents=True)
        self.temporary.mkdir()


@dataclass(frozen=True)
class ProcessExit:
    """How a child exited: exit code or minus a signal, its output, and its counts."""

    code: int
    said: str
    calls: int = 0
    events: int = 0


def run(
    command: Command,
    given: Path,
    place: Place,
    *more: str,
    moment: Moment = NEVER,
    limit: Callable[[], None] = lambda: None,
) -> ProcessExit:
    """Fork, run the command line to its end, and return the result."""
    words = [word.format(given=given, out=place.out) for word in (*command.words, *more)]
    said, counts = (
        place.root.with_suffix(suffix) for suffix in (".said", ".counts")
    )  # not on its disk
    pid = os.fork()
    if not pid:
        try:
            _become(place, said)
            command.prepare()
            limit()
            _exit(words, moment, (place.out, place.temporary, given), counts)
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    code = _wait(pid)
    numbers = counts.read_text().split() if counts.exists() else ["0", "0"]
    counts.unlink(missing_ok=True)
    return ProcessExit(code, said.read_text(errors="replace"), *map(int, numbers))


def modules(command: Command, given: Path, place: Place) -> list[str]:
    """Return the modules that the command imports, so that the parent can import them first."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        try:
            _become(place, place.root.with_suffix(".said"))
            command.prepare()
            words = [word.format(given=given, out=place.out) for word in command.words]
            _main(words)
        finally:
            with os.fdopen(writer, "w") as pipe:
                pipe.write("\n".join(sys.modules))
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        names = pipe.read().split("\n")
    _wait(pid)
    return names


def _become(place: Place, said: Path) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # background shells ignore SIGINT
        signal.signal(number, signal.SIG_DFL)
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ["TMPDIR"] = str(place.temporary)
    import tempfile

    tempfile.tempdir = None
    os.chdir(place.root)


def _main(words: list[str]) -> int:
    from saccade.__main__ import main

    sys.argv = ["saccade", *words]
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0) if not isinstance(end.code, str) else 1


def _exit(words: list[str], moment: Moment, folders: tuple[Path, ...], counts: Path) -> None:
    counted: Clock | None = None
    try:
        with clock(moment, folders) as counted:
            code = _main(words)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 98
    if moment.number == 0 and counted is not None:
        counts.write_text(f"{counted.calls} {counted.events}")
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _wait(pid: int) -> int:
    end = time.monotonic() + _MOST_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -999


def survivors(place: Place, patience_s: float = 10.0) -> list[int]:
    """Return the processes of a trial that still run after a while, and kill them."""
    wanted = f"TMPDIR={place.temporary}".encode()
    end = time.monotonic() + patience_s
    while (pids := _with(wanted)) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _with(wanted: bytes) -> list[int]:
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            zombie = b"\nState:\tZ" in (entry / "status").read_bytes()
            if not zombie and wanted in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def imported(names: list[str]) -> None:
    """Import these modules, if possible, in the order in which a child did."""
    from importlib import import_module

    for name in names:
        if name not in sys.modules and name != "__main__" and not name.startswith("_pytest"):
            with suppress(Exception):
                import_module(name)


def threads() -> int:
    """Return the number of threads of this process; a fork keeps only one."""
    return len(list(Path("/proc/self/task").iterdir()))
