# SPDX-License-Identifier: Apache-2.0
"""Removes what a killed run leaves behind: `python reaper.py FOLDER PARENT_PID`.

Before it exits cleanly, the parent writes a word to the reaper's standard input. If that word does
not arrive, for example after SIGKILL, the reaper kills the run's processes and removes its files.
It runs as a file in a separate interpreter, so that it is small and shares nothing with its parent.
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
    """Wait for the parent's exit, and clean up after it if it did not exit cleanly."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    # A signal to a whole group or session is meant for the parent, which then tells us what to do.
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
    """Kill the servers and stubs of a run, and return how many there were."""
    # A stub exits by itself when its server is gone, but not while the server is an unreaped
    # zombie, and not while the stub waits for an answer from the server.
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
    # The end of the pipe shows it immediately, but a fork of the parent may keep the pipe open.
    while os.getppid() == parent:
        if select.select([0], [], [], _PARENT_INTERVAL_S)[0]:
            return os.read(0, len(ORDERLY)) == ORDERLY
    return False


if __name__ == "__main__":
    main()
