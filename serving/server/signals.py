# SPDX-License-Identifier: Apache-2.0
"""Signals to `saccade serve`: stop, or read the repository again."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from saccade.core import interruption
from saccade.core.errors import SaccadeError
from saccade.serving.server.json_log import event

LOGGER = logging.getLogger("saccade.serve")
_FAILED = "The update failed. The old repository is still served."


class Reloads(Protocol):
    """Interface of a server that can read its repository again."""

    def reload(self) -> None:
        """Read the repository again, check it and serve it."""


class HangUp:
    """Handler of SIGHUP: read the repository again, unless the terminal was closed.

    The system sends the same signal when a terminal is closed, but removes the terminal from the
    process first, so the two cases can be distinguished. A closed terminal stops the command, as
    usual, or is ignored if SIGHUP was ignored before (nohup).

    One thread does the updates, one after the other. Signals that arrive during an update lead to
    one more afterwards.
    """

    def __init__(self, ignored: bool) -> None:
        self._ignored = ignored
        self._had_terminal = _has_terminal()
        self._server: Reloads | None = None
        # Only this queue may be used in a handler that another signal can interrupt.
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._updating = False

    def call(self, server: Reloads) -> None:
        """Direct the signal to this server from now on."""
        self._server = server
        # The check takes seconds, and a signal handler must not block.
        threading.Thread(target=self._update, args=(server,), daemon=True).start()

    def close(self) -> None:
        """End the thread after the current update."""
        self._signals.put(False)

    def __call__(self, number: int, *_: object) -> None:
        """Handle the signal."""
        if self._had_terminal and not _has_terminal():
            self._had_terminal = False
            if not self._ignored:
                interruption.interrupt(number)
        elif self._server is None:
            LOGGER.warning("SIGHUP ignored: the server is still starting with this repository.")
        else:
            if self._updating:
                text = "SIGHUP: an update is in progress. Afterwards, the repository is read again."
                LOGGER.info(text, **event("reload_pending"))
            self._signals.put(True)

    def _update(self, server: Reloads) -> None:
        while self._signals.get():
            self._updating = True
            with suppress(Empty):
                while self._signals.get_nowait():
                    pass  # one update serves all signals that came before it
                return
            _reload(server)
            self._updating = False


@contextmanager
def signals() -> Iterator[HangUp]:
    """Let SIGINT and SIGTERM end the block as Ctrl-C does, even in a background shell."""
    hang_up = HangUp(ignored=signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    if threading.current_thread() is not threading.main_thread():
        try:
            yield hang_up
        finally:
            hang_up.close()
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
        hang_up.close()


def _reload(server: Reloads) -> None:
    LOGGER.info("SIGHUP: reading the repository again.", **event("reloading"))
    try:
        server.reload()
    except SaccadeError as error:
        LOGGER.error(f"{_FAILED} %s", error, **event("reload_failed"))
    except Exception:
        LOGGER.exception(_FAILED, **event("reload_failed"))
    else:
        LOGGER.info("The new repository is being served.", **event("reloaded"))


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
