# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: one line, exit code 128 + signal, and never a stack trace."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.02
_LINE = "saccade: interrupted.\n"


class Interrupted(KeyboardInterrupt):
    """Exception that a signal raises.

    If a plain KeyboardInterrupt leaves code that ran through `exec` (as in every dataclass),
    Python 3.11 records it as unhandled, and `python -m` dies of SIGINT whatever is returned.
    """


_received: int | None = None
_deferrals, _waiting = 0, False


def leave_at_once() -> None:
    """Let a signal exit immediately, without cleanup: before any work or after all of it.

    An exception in the middle of an import would become another one, with a stack trace.
    """
    _handle(_leave)


def raise_on_signals() -> None:
    """Let a signal raise Interrupted from now on, so that unfinished work is cleaned up."""
    global _received, _waiting
    _received, _waiting = None, False
    _handle(interrupt)


def interrupt(number: int, _frame: object = None) -> None:
    """Signal handler that raises Interrupted, immediately or after `deferred`."""
    global _received, _waiting
    _received = number
    if _deferrals:
        _waiting = True
        return
    raise Interrupted


def received() -> int | None:
    """Return the last signal since `raise_on_signals`."""
    return _received


def tell() -> int:
    """Report that the command was interrupted, and return its exit code."""
    leave_at_once()
    sys.stderr.write(_LINE)
    sys.stderr.flush()
    return 128 + (_received or signal.SIGINT)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer signals, except SIGKILL, until the renames or removals in the block are done."""
    global _deferrals, _waiting
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1
        if _waiting and not _deferrals:
            _waiting = False
            raise Interrupted


def never_swallow() -> None:
    """Raise interrupts that a destructor or a C callback would swallow, right after it."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if _received is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Raised inside this hook, it would be swallowed too.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), _received))
            again.daemon = True
            again.start()
        else:
            before(unraisable)

    sys.unraisablehook = hook


def _handle(handler: Callable[[int, Any], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        # A shell starts background jobs with SIGINT ignored; leave that as it is.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    os.write(2, _LINE.encode())
    os._exit(128 + number)
