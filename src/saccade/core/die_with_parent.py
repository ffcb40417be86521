# SPDX-License-Identifier: Apache-2.0
"""Run a program that dies with its parent: `python die_with_parent.py PARENT_PID PROGRAM ...`.

It runs as a file in a separate interpreter, because a hook between fork and exec would be unsafe
in a parent with threads. The kernel sends the signal when the parent's *thread* ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def dying_with_parent(command: list[str]) -> list[str]:
    """Return a command that dies with the thread that starts it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main() -> None:
    """Tie this process to its parent and replace it by the program."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit("the parent exited before the program started")
    # Ignored signals survive exec. Python ignores SIGPIPE, and a background shell ignores SIGINT.
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
