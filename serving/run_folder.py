# SPDX-License-Identifier: Apache-2.0
"""The temporary files of one run, and whatever a run that was killed has left behind."""

import fcntl
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from saccade.serving.installation import STUB

_PREFIX = "saccade-serve-"
_LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


class RunFolder:
    """A temporary folder that is gone after the block, with the shared memory named after it.

    While the run lives it holds a lock in its folder; a later run removes folders (with
    their shared memory and processes) whose lock nobody holds.
    """

    def __enter__(self) -> "RunFolder":
        _remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it gets its name, so that nobody sees it unlocked.
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / ".lock").rename(self.path / _LOCK)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        remove_regions(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_regions(prefix: str) -> None:
    """Remove shared memory whose name starts with `prefix`."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):
            region.unlink()


def close_regions(prefix: str) -> None:
    """Make shared memory whose name starts with `prefix` its user's alone."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):
            region.chmod(0o600)


def _kill_stubs(run: str) -> None:
    # A stub ends when its server is gone, but not while that is a zombie nobody reaps.
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, *arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if program.endswith(STUB.encode()) and any(run.encode() in each for each in arguments):
                os.kill(int(entry.name), signal.SIGKILL)


def _remove_leftovers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _kill_stubs(folder.name)
                remove_regions(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
