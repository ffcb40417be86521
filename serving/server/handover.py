# SPDX-License-Identifier: Apache-2.0
"""Handover from one server process to another on the same ports, without a failed call.

The second server listens next to the first, but gets no callers until it is loaded. Then all new
connections go to it. Connections to the first end at their maximum age, between calls, and are
opened again.
"""

import logging
import threading
import time
from collections.abc import Callable

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.server import listeners
from saccade.serving.server import process as server_process
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.json_log import event
from saccade.serving.server.process import ServerProcess
from saccade.serving.server.run_folder import RunFolder
from saccade.serving.server.start_limit import StartLimit

LOGGER = logging.getLogger("saccade.serve")

Start = Callable[[RunFolder], ServerProcess]


class Replacement:
    """A requested second server, until it has taken over or failed."""

    def __init__(
        self, start: Start, model: str, variants: tuple[str, ...], repository: str
    ) -> None:
        """`repository` is its SHA-256."""
        self.start = start
        self.model = model
        self.variants = variants
        self.repository = repository
        self.process: ServerProcess | None = None
        self.failure: SaccadeError | None = None
        self.settled = threading.Event()

    def begin(self, folder: RunFolder) -> None:
        """Start it next to the first."""
        try:
            self.process = self.start(folder)
            self._limit = StartLimit(self.process.cpu_s)
        except (SaccadeError, OSError) as error:
            self.fail(f"The new server could not be started: {error}")

    def loaded(self, start_timeout_s: float) -> bool:
        """Return True once everything is loaded; fail if it has exited or takes too long.

        Units: start_timeout_s is the time without progress.
        """
        if self.process is None:
            return False
        if ended := self.process.exit_text():
            self.fail(f"The new server exited during its start ({ended}).")
        elif self.process.loaded():
            return True
        elif self._limit.is_over(start_timeout_s):
            self.fail(f"The new server was not ready {self._limit.text(start_timeout_s)}.")
        return False

    def fail(self, text: str) -> None:
        """Give up on it; the first server continues."""
        if self.process is not None:
            self.process.stop(at_once=True)
            self.process = None
        self.failure = ServerFailed(text)
        self.settled.set()


class Drain:
    """A server that gets no new callers, and is stopped when its last caller has left.

    Units: patience_s is the time for calls in flight, if that is longer than the options'.
    """

    def __init__(self, process: ServerProcess, options: ServeOptions, patience_s: float) -> None:
        self.process, self._patience_s = process, max(patience_s, options.grace_s)
        # gRPC spreads the ages of connections by a tenth.
        self._end_s = time.monotonic() + 1.1 * server_process.CONNECTION_AGE_S + self._patience_s

    def ended(self) -> bool:
        """Return True once it is gone; stop it when it has no callers or its time is up."""
        is_over = time.monotonic() > self._end_s
        callers = 0 if self.process.exit_text() else self.process.callers()
        if callers and not is_over:
            return False
        if callers:
            fields = event("connections_closed", connections=callers)
            noun = "connection" if callers == 1 else "connections"
            LOGGER.warning("Closing %d %s to the old server.", callers, noun, **fields)
        self.process.stop(at_once=not callers)
        return True


def receive_callers(process: ServerProcess) -> None:
    """Send new connections to this server, even if others listen on its ports."""
    for port in process.ports():
        every = listeners.listening(port)
        mine = listeners.own(every, process.pid)
        if not mine:
            continue
        try:
            # The others started to listen earlier, so our sockets come after theirs.
            listeners.send_callers_to(mine, len(every) - len(mine))
        except OSError as error:
            LOGGER.debug("Port %d: callers go to all processes listening on it (%s).", port, error)


def foreign_listeners(process: ServerProcess) -> list[int]:
    """Return ports on which another process listens too, which the system allows the same user."""
    pids = []
    for port in process.ports():
        every = listeners.listening(port)
        if len(listeners.own(every, process.pid)) < len(every):
            pids.append(port)
    return pids
