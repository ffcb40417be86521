# SPDX-License-Identifier: Apache-2.0
"""Run a program with files that only its user can read, and the maximum number of open files.

Run it as `python process_limits.py PROGRAM ARGUMENT...` in a separate interpreter. Child processes
inherit all of these settings, so they apply to the server's stubs too.
"""

import ctypes
import os
import resource
import sys

# Kernel numbers by machine: the audit architecture, and the system calls `fchmod` and `seccomp`.
_CALLS = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
_NO_NEW_PRIVILEGES, _SET_FILTER, _SPECULATION_ALLOWED = 38, 1, 4
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of a filter
_ALLOW, _ANSWER_0 = 0x7FFF0000, 0x00050000


class _Step(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("skip_if", ctypes.c_uint8),
        ("skip_else", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def main() -> None:
    """Apply the settings, then replace this process by the program."""
    os.umask(0o077)
    keep_modes()
    # Every connection needs a descriptor; idle ones can use up the usual soft limit of 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(sys.argv[1], sys.argv[1:])


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


if __name__ == "__main__":
    main()
