# SPDX-License-Identifier: Apache-2.0
"""Become a program whose files are its user's alone and that may open as many as it is allowed.

`python process_limits.py PROGRAM ARGUMENT...`, as a file by an interpreter of its own: all of it
is what a process hands on, so that the server's stubs have it too.
"""

import ctypes
import os
import resource
import sys

# Numbers of the kernel: by machine the audit architecture, and the calls `fchmod` and `seccomp`.
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
    """Set all of it and be replaced by the program."""
    os.umask(0o077)
    keep_modes()
    # Every connection is a descriptor; the usual soft limit of 1,024 is used up by idle ones.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.execv(sys.argv[1], sys.argv[1:])


def keep_modes() -> None:
    """Files stay as the umask has them: from now on `fchmod` succeeds and changes nothing.

    Boost makes the shared memory in which callers' images are and then sets its mode to 0644,
    whatever the umask. Nothing else in server or stubs calls it. Where the kernel refuses a
    filter, the modes are changed once the models are loaded.
    """
    machine = _CALLS.get(os.uname().machine)
    if machine is None:
        return
    architecture, fchmod, seccomp = machine
    steps = (_Step * 6)(
        _Step(_LOAD, 0, 0, 4),  # of the machine: a call of another one has other numbers
        _Step(_IF_EQUAL, 0, 3, architecture),
        _Step(_LOAD, 0, 0, 0),  # of the call
        _Step(_IF_EQUAL, 0, 1, fchmod),
        _Step(_RETURN, 0, 0, _ANSWER_0),
        _Step(_RETURN, 0, 0, _ALLOW),
    )
    program = _Filter(len(steps), steps)
    library = ctypes.CDLL(None)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # Without the flag older kernels slow down every process that has a filter.
    library.syscall(seccomp, _SET_FILTER, _SPECULATION_ALLOWED, ctypes.byref(program))


if __name__ == "__main__":
    main()
