# SPDX-License-Identifier: Apache-2.0
"""Watches one server: starts it, sees what dies or hangs, restarts it, says who answers."""

import logging
import threading
import time
from collections.abc import Callable

from saccade.plugins.errors import ServerFailed
from saccade.serving.addresses import ServeOptions, address
from saccade.serving.liveness import Liveness
from saccade.serving.patience import FORGIVEN_AFTER_S, Patience
from saccade.serving.probe import Prober
from saccade.serving.readiness import Board
from saccade.serving.run_folder import RunFolder
from saccade.serving.server_log import ServerLog
from saccade.serving.server_process import ServerProcess

LOGGER = logging.getLogger("saccade.serve")

LIVENESS_INTERVAL_S = 0.25


class Supervisor(threading.Thread):
    """The thread that owns the server from its start to its end.

    The kernel ends the server with the thread that started it, so it is always this one.
    `settled` is set when the first start has succeeded or failed, `finished` when nothing is
    left of the server; wait for it, since an interrupted `join` takes the thread for ended.
    `failure` says how it ended.
    """

    def __init__(
        self,
        start: Callable[[RunFolder], ServerProcess],
        options: ServeOptions,
        board: Board,
        log: ServerLog,
    ) -> None:
        super().__init__(name="saccade-supervisor", daemon=True)
        self._start_process = start
        self._options = options
        self._board = board
        self._log = log
        self._ending = threading.Event()
        self._hurry = False
        self._hangs = False  # the server as a whole: it does not even answer for its models
        self._process: ServerProcess | None = None
        self.settled = threading.Event()
        self.finished = threading.Event()
        self.failure: BaseException | None = None
        self.restarts = 0

    @property
    def pid(self) -> int:
        """The process id of the server that runs now, 0 if none does."""
        return self._process.pid if self._process else 0

    def stop(self, *, at_once: bool = False) -> None:
        """Ask for the end; `at_once` does not let requests in flight finish."""
        self._hurry |= at_once
        self._ending.set()

    def run(self) -> None:
        """Serve until asked to stop or out of patience with the server."""
        try:
            with RunFolder() as folder:
                self._serve(folder)
            self._board.reset("stopped")
        except BaseException as error:
            self.failure = error
            self._board.reset("failed")
        finally:
            self._log.close()
            self.settled.set()
            self.finished.set()

    def _serve(self, folder: RunFolder) -> None:
        patience = Patience()
        while True:
            trouble, served_s = self._one_life(folder)
            if trouble is None:
                return
            if not self.settled.is_set() or not self._options.restart:
                raise ServerFailed(f"{trouble} Its last lines:\n{self._log.last_lines()}")
            wait_s = patience.after(served_s)
            if wait_s is None:
                raise ServerFailed(
                    f"{trouble} It was restarted {self.restarts} times, with less than "
                    f"{FORGIVEN_AFTER_S:g} s of service for each. Its last lines:\n"
                    f"{self._log.last_lines()}"
                )
            LOGGER.error("%s Restarting it.", trouble)
            self._board.reset("restarting")
            if self._ending.wait(wait_s):
                return
            self.restarts += 1

    def _one_life(self, folder: RunFolder) -> tuple[str | None, float]:
        """Start a server and watch it. Returns what went wrong, and the seconds it served."""
        process = self._process = self._start_process(folder)
        prober = Prober(
            address(self._options.host, self._options.grpc_port), self._options.probe_timeout_s
        )
        served_from, self._hangs = None, False
        try:
            trouble = self._wait_loaded(process, prober)
            if trouble is None and not self._ending.is_set():
                self._board.enter("serving")
                self.settled.set()
                served_from = time.monotonic()
                trouble = self._watch(process, prober)
        finally:
            self._process = None
            prober.close()
            process.stop(at_once=self._hurry or self._hangs or served_from is None)
        return trouble, 0 if served_from is None else time.monotonic() - served_from

    def _wait_loaded(self, process: ServerProcess, prober: Prober) -> str | None:
        end = time.monotonic() + self._options.start_timeout_s
        models = (*self._board.variants, self._board.model)
        reason = "it does not say that its models are loaded."
        while not self._ending.wait(0.05):
            if ended := process.exit_text():
                return f"The server ended while it started ({ended})."
            if time.monotonic() > end:
                return (
                    f"The server was not ready within {self._options.start_timeout_s:g} s: {reason}"
                    " Allow more with --start-timeout-s."
                )
            if not process.loaded():
                continue
            process.find_stubs()
            probes = prober.all_of(models)
            for probe in probes:
                self._board.mark(probe.model, probe.reason)
            reason = next((probe.reason for probe in probes if probe.reason), "")
            if not reason:
                return None
        return None

    def _watch(self, process: ServerProcess, prober: Prober) -> str | None:
        liveness = Liveness(process, prober, self._board, self._options.probe_interval_s)
        trouble = None
        while trouble is None and not self._ending.wait(LIVENESS_INTERVAL_S):
            trouble = self._dead(process) or liveness.look()
            self._hangs = liveness.hangs
        return trouble

    def _dead(self, process: ServerProcess) -> str | None:
        if ended := process.exit_text():
            self._board.reset("restarting")
            return f"The server ended ({ended})."
        dead = process.dead_stubs()
        if not dead:
            return None
        for stub in dead:
            self._board.mark(stub.model or self._board.model, "its process has died")
        names = ", ".join(stub.model or str(stub.pid) for stub in dead)
        LOGGER.error("The process of %s has died; the server is not ready.", names)
        if self._options.restart:
            # Whoever asks /ready can turn away before the other variants pause, too.
            self._ending.wait(self._options.grace_s)
        return f"The process of {names} has died (out of memory, or killed)."
