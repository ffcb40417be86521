# SPDX-License-Identifier: Apache-2.0
"""Removes what a killed run leaves behind: `python reaper.py FOLDER PARENT_PID`.

The parent writes a word to its standard input before it ends in order. Where that word does not
come, as after SIGKILL, the processes of the run are killed and its files removed. Run as a file
by an interpreter of its own, so that it is small and shares nothing with its parent.
"""

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ORDERLY = b"orderly"
_STUB = b"triton_python_backend_stub"
_PARENT_INTERVAL_S = 0.2
_KILL_S = 10.0


def main() -> None:
    """Wait for the parent's end; clean up after it if that was not an orderly one."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    # Whoever ends a whole group or session means the parent, which then says what it wants.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not _ends_orderly(parent):
        reap(folder)


def reap(folder: Path) -> None:
    """Kill the processes of a run, then remove its shared memory and its folder."""
    end = time.monotonic() + _KILL_S
    while kill_processes(folder) and time.monotonic() < end:
        time.sleep(0.02)
    remove_regions(folder.name)
    shutil.rmtree(folder, ignore_errors=True)


def kill_processes(folder: Path) -> int:
    """Kill the servers and stubs of a run. Returns how many there were."""
    # A stub ends by itself when its server is gone, but not while that is a zombie nobody reaps,
    # and not while it waits for an answer of the server.
    count, run = 0, folder.name.encode()
    served = f"--model-repository={folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_stub = words[0].endswith(_STUB) and any(run in word for word in words)
            if is_stub or any(word.startswith(served) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
                count += 1
    return count


def remove_regions(prefix: str) -> None:
    """Remove shared memory whose name starts with `prefix`."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        with suppress(OSError):
            region.unlink()


def _ends_orderly(parent: int) -> bool:
    # The end of the pipe says it at once; a fork of the parent may hold the pipe open longer.
    while os.getppid() == parent:
        if select.select([0], [], [], _PARENT_INTERVAL_S)[0]:
            return os.read(0, len(ORDERLY)) == ORDERLY
    return False


if __name__ == "__main__":
    main()
