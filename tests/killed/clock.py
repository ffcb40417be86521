# SPDX-License-Identifier: Apache-2.0
"""Moments in a process that do not depend on the machine: its n-th call or its n-th file event.

The fault at this moment is a signal to the process itself, or a system call without disk space.
"""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGES = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "shutil.rmtree", "subprocess.Popen", "ctypes.dlopen",
}  # fmt: skip
_MAKES = {"open", "os.mkdir", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Moment:
    """The moment and kind of a fault.

    `clock` is call, file, import or none; `fault` is a signal or ENOSPC.
    """

    clock: str
    number: int
    fault: str


class Clock:
    """Counts events in some folders, and injects the fault at its moment."""

    def __init__(self, moment: Moment, folders: tuple[Path, ...]) -> None:
        self.moment, self.folders = moment, tuple(map(str, folders))
        self.calls = self.events = self.imports = 0
        self.running = False

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        """The hook for `sys.addaudithook`, which runs before the event."""
        if not self.running:
            return
        if event == "import":
            self.imports += 1
            self._tick("import", self.imports)
            return
        if event == "open":
            # The mode is None for os.open, and for files that Python opens itself.
            if not given[2] & _WRITING or not self._is_ours(given[0]):
                return
        elif event not in _CHANGES:
            return
        if self.moment.fault == "ENOSPC" and event not in _MAKES:
            return
        self.events += 1
        self._tick("file", self.events, str(given[0]) if given else "")

    def profile(self, _frame: Any, event: str, _given: Any) -> None:
        """The hook for `sys.setprofile`."""
        if event == "call" and self.running:
            self.calls += 1
            if self.calls == self.moment.number:
                sys.setprofile(None)
                self._tick("call", self.calls)

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(self.folders)

    def _tick(self, clock: str, number: int, path: str = "") -> None:
        if (clock, number) != (self.moment.clock, self.moment.number):
            return
        if self.moment.fault == "ENOSPC":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.kill(os.getpid(), signal.Signals[self.moment.fault])


@contextmanager
def clock(moment: Moment, folders: tuple[Path, ...]) -> Iterator[Clock]:
    """Count inside the block. The hooks stay, so the process should exit after it."""
    ticking = Clock(moment, folders)
    sys.addaudithook(ticking.audit)
    if moment.clock == "call":
        sys.setprofile(ticking.profile)
    ticking.running = True
    try:
        yield ticking
    finally:
        ticking.running = False
        sys.setprofile(None)
