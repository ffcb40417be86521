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
    """What a signal raises.

    Where a plain KeyboardInterrupt leaves code given to `exec` as text (that of every dataclass),
    Python 3.11 remembers it as unhandled, and `python -m` ends by SIGINT whatever is returned.
    """


_received: int | None = None
_deferrals, _waiting = 0, False


def leave_at_once() -> None:
    """Leave at once, before anything is begun or after all is done: a signal cleans up nothing.

    An exception in the middle of an import would come out of it as another one, with a trace.
    """
    _handle(_leave)


def raise_on_signals() -> None:
    """From here on a signal raises Interrupted, so that what was begun is removed."""
    global _received, _waiting
    _received, _waiting = None, False
    _handle(interrupt)


def interrupt(number: int, _frame: object = None) -> None:
    """The handler of a signal that raises Interrupted, at once or after `deferred`."""
    global _received, _waiting
    _received = number
    if _deferrals:
        _waiting = True
        return
    raise Interrupted


def received() -> int | None:
    """The last signal since `raise_on_signals`."""
    return _received


def tell() -> int:
    """Say that the command was interrupted; its exit code."""
    leave_at_once()
    sys.stderr.write(_LINE)
    sys.stderr.flush()
    return 128 + (_received or signal.SIGINT)


@contextmanager
def deferred() -> Iterator[None]:
    """A few renames or removals that a signal, but for SIGKILL, must not come between."""
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
    """A destructor or a callback of C swallows an exception with a trace: raise it after it."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if _received is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Raised in this hook it would be swallowed as well.
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
        # A shell starts what it puts into the background without SIGINT, and so it stays.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    os.write(2, _LINE.encode())
    os._exit(128 + number)
