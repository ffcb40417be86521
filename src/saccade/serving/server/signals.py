# SPDX-License-Identifier: Apache-2.0
"""Signals to `saccade serve`: an end, or another look at the repository."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from saccade import interruption
from saccade.errors import SaccadeError
from saccade.serving.server.json_log import event

LOGGER = logging.getLogger("saccade.serve")
_FAILED = "The update failed, and what was served before is served on."


class Reloads(Protocol):
    """Interface of what can be told to read its repository again."""

    def reload(self) -> None:
        """Read it, check it, serve it."""


class HangUp:
    """SIGHUP: read the repository again, unless it comes because the terminal has gone.

    The system sends the same signal when a terminal is closed, and takes the terminal away from
    the process first: that tells them apart. A terminal that goes ends the command, as it always
    did, or is ignored where SIGHUP was ignored before (nohup).
    """

    def __init__(self, ignored: bool) -> None:
        self._ignored = ignored
        self._had_terminal = _has_terminal()
        self._server: Reloads | None = None

    def call(self, server: Reloads) -> None:
        """From now on the signal is for this server."""
        self._server = server

    def __call__(self, number: int, *_: object) -> None:
        """The signal's handler."""
        if self._had_terminal and not _has_terminal():
            self._had_terminal = False
            if not self._ignored:
                interruption.interrupt(number)
        elif self._server is None:
            LOGGER.warning("SIGHUP: the server is still starting, with the repository as it is.")
        else:
            # A check takes seconds, and a handler must not wait.
            threading.Thread(target=_reload, args=(self._server,), daemon=True).start()


@contextmanager
def signals() -> Iterator[HangUp]:
    """SIGINT and SIGTERM end the block as Ctrl-C does, even in a background shell."""
    hang_up = HangUp(ignored=signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    if threading.current_thread() is not threading.main_thread():
        yield hang_up
        return
    handlers: dict[signal.Signals, Callable[..., None]] = {
        signal.SIGINT: interruption.interrupt,
        signal.SIGTERM: interruption.interrupt,
        signal.SIGHUP: hang_up,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield hang_up
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reload(server: Reloads) -> None:
    LOGGER.info("SIGHUP: reading the repository again.", **event("reloading"))
    try:
        server.reload()
    except SaccadeError as error:
        LOGGER.error(f"{_FAILED} %s", error, **event("reload_failed"))
    except Exception:
        LOGGER.exception(_FAILED, **event("reload_failed"))
    else:
        LOGGER.info("The new repository is served.", **event("reloaded"))


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
