# SPDX-License-Identifier: Apache-2.0
"""The temporary files of one run, and the leftovers of runs that were killed."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from saccade.serving.server.reaper import (
    ORDERLY,
    SHARED_MEMORY,
    kill_processes,
    reap,
    remove_regions,
)

__all__ = ["SHARED_MEMORY", "RunFolder", "close_regions", "remove_regions"]

_PREFIX = "saccade-serve-"
_LOCK = "lock"


class RunFolder:
    """A temporary folder, removed after the block together with the shared memory named after it.

    If this process is killed, a small process, the reaper, removes both and kills the run's
    processes. While the run is alive, it holds a lock in its folder. If the reaper is killed too,
    a later run removes folders whose lock is free, with their shared memory and processes.
    """

    def __enter__(self) -> "RunFolder":
        _remove_leftovers()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Lock the folder before it gets its name, so that no other run sees it unlocked.
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / ".lock").rename(self.path / _LOCK)
        # This lock tells systemd-tmpfiles to leave the folder alone, however old it is.
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._reaper = _start_reaper(self.path)
        return self

    def keep_reaper(self) -> None:
        """Start the reaper again if it has died."""
        if self._reaper.poll() is not None:
            self._release()
            self._reaper = _start_reaper(self.path)

    def __exit__(self, *_: object) -> None:
        kill_processes(self.path)
        remove_regions(self.path.name)
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        os.close(self._held)
        self._lock.close()

    def _release(self) -> None:
        # A reaper that was killed no longer reads.
        assert self._reaper.stdin is not None
        with suppress(OSError):
            self._reaper.stdin.write(ORDERLY)
        self._reaper.stdin.close()
        self._reaper.wait()


def _start_reaper(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-IS", Path(__file__).with_name("reaper.py"), folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # a Ctrl-C in the terminal is for the run, not for the reaper
    )


def close_regions(prefix: str) -> None:
    """Restrict shared memory whose name starts with `prefix` to its user."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):
            region.chmod(0o600)


def _remove_leftovers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reap(folder)
