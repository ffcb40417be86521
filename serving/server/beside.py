# SPDX-License-Identifier: Apache-2.0
"""Programs beside the server, each in a separate interpreter that imports nothing of saccade.

`python beside.py limited PROGRAM ARGUMENT...` runs a program with files that only its user can
read, and the maximum number of open files. Child processes inherit all of these settings, so they
apply to the server's stubs too.

`python beside.py reaper FOLDER PARENT_PID` removes what a killed run leaves behind. Before it exits
cleanly, the parent writes a word to the reaper's standard input. If that word does not arrive, for
example after SIGKILL, the reaper kills the run's processes and removes its files.
"""

import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# Kernel numbers by machine: the audit architecture, and the system calls `fchmod` and `seccomp`.
_CALLS = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
_NO_NEW_PRIVILEGES, _SET_FILTER, _SPECULATION_ALLOWED = 38, 1, 4
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of a filter
_ALLOW, _ANSWER_0 = 0x7FFF0000, 0x00050000
SHARED_MEMORY = Path("/dev/shm")
ORDERLY = b"orderly"
PROXY_CONFIG = "envoy.yaml"  # in the run's folder: by it, Envoy is recognized as one of the run
_STUB = b"triton_python_backend_stub"
_PARENT_INTERVAL_S = 0.2
_KILL_S = 10.0


class _Step(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("skip_if", ctypes.c_uint8),
        ("skip_else", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def limited() -> None:
    """Apply the settings, then replace this process by the program."""
    os.umask(0o077)
    keep_modes()
    # Every connection needs a descriptor; idle ones can use up the usual soft limit of 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(sys.argv[2], sys.argv[2:])


def keep_modes() -> None:
    """Keep the file modes that the umask gives: from now on, `fchmod` succeeds without effect.

    Boost creates the shared memory that contains callers' images, and then sets its mode to 0644
    regardless of the umask. Nothing else in the server or its stubs calls `fchmod`. If the kernel
    refuses the filter, the modes are changed after the models are loaded.
    """
    machine = _CALLS.get(os.uname().machine)
    if machine is None:
        return
    architecture, fchmod, seccomp = machine
    steps = (_Step * 6)(
        _Step(_LOAD, 0, 0, 4),  # the architecture: another one has other call numbers
        _Step(_IF_EQUAL, 0, 3, architecture),
        _Step(_LOAD, 0, 0, 0),  # the number of the system call
        _Step(_IF_EQUAL, 0, 1, fchmod),
        _Step(_RETURN, 0, 0, _ANSWER_0),
        _Step(_RETURN, 0, 0, _ALLOW),
    )
    program = _Filter(len(steps), steps)
    library = ctypes.CDLL(None)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # Without this flag, older kernels slow down every process that has a filter.
    library.syscall(seccomp, _SET_FILTER, _SPECULATION_ALLOWED, ctypes.byref(program))


def wait_for_parent() -> None:
    """Wait for the parent's exit, and clean up after it if it did not exit cleanly."""
    folder, parent = Path(sys.argv[2]), int(sys.argv[3])
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
    """Kill the servers, stubs and proxies of a run, and return how many there were."""
    # A stub exits by itself when its server is gone, but not while the server is an unreaped
    # zombie, and not while the stub waits for an answer from the server.
    count, run = 0, folder.name.encode()
    served = f"--model-repository={folder}/".encode(), f"{folder}/{PROXY_CONFIG}".encode()
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
    {"limited": limited, "reaper": wait_for_parent}[sys.argv[1]]()
