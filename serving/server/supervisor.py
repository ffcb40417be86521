# SPDX-License-Identifier: Apache-2.0
"""The supervisor of one server: start it, notice what dies or hangs, restart it, replace it.

A replacement listens next to the first server, but gets no callers until it is loaded. Then all new
connections go to it. Connections to the first end at their maximum age, between calls, and are
opened again.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.core.sizes import counted
from saccade.serving.client.readiness import Board, Probe, Prober
from saccade.serving.server import process as server_process
from saccade.serving.server.addresses import (
    ServeOptions,
    address,
    listeners,
    own,
    send_callers_to,
)
from saccade.serving.server.envoy_process import EnvoyProcess
from saccade.serving.server.liveness import Liveness, VariantReload
from saccade.serving.server.log import SERVICE, ServerLog, report
from saccade.serving.server.process import MOST_TROUBLES, Patience, ServerProcess, StartLimit
from saccade.serving.server.run_folder import RunFolder, remove_other_copies

LIVENESS_INTERVAL_S = 0.25
LEFT_TIMES = 3.0  # a server that ends may take this many times as long as its work should take
# The server keeps the dead instance of each reloaded model: about 1 MiB, a region of shared memory
# and about 36 threads. After this many reloads, a new server replaces it.
RELOADS_A_PROCESS = 20


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
        count = 0 if self.process.exit_text() else self.process.callers()
        if count and not is_over:
            return False
        if count:
            text = f"Closing {counted(count, 'connection')} to the old server."
            report(logging.WARNING, "connections_closed", text, connections=count)
        self.process.stop(at_once=not count)
        return True


def receive_callers(process: ServerProcess) -> None:
    """Send new connections to this server, even if others listen on its ports."""
    for port in process.ports():
        every = listeners(port)
        mine = own(every, process.pid)
        if not mine:
            continue
        try:
            # The others started to listen earlier, so our sockets come after theirs.
            send_callers_to(mine, len(every) - len(mine))
        except OSError as error:
            SERVICE.debug("Port %d: callers go to all processes listening on it (%s).", port, error)


def foreign_listeners(process: ServerProcess) -> list[int]:
    """Return ports on which another process listens too, which the system allows the same user."""
    pids = []
    for port in process.ports():
        every = listeners(port)
        if len(own(every, process.pid)) < len(every):
            pids.append(port)
    return pids


class InFlight:
    """The requests in the lanes of one router since it was first asked, until they are answered."""

    def __init__(self) -> None:
        self._least: dict[str, int] | None = None  # groups after which what was in flight is done
        self._rounds = 0  # a call that goes from lane to lane is in each of them at most once

    def is_over(self, lanes: Sequence[dict[str, Any]]) -> bool:
        """Return whether all of them were answered, by this report of the lanes."""
        busy = {
            f"{lane['variant']} {lane['part']}": lane
            for lane in lanes
            if lane["running_s"] or lane["waiting"]
        }
        if self._least is None:
            self._least = {key: lane["begun"] + lane["waiting"] - 1 for key, lane in busy.items()}
        if any(lane["groups"] <= self._least.get(key, -1) for key, lane in busy.items()):
            return False
        self._least, self._rounds = None, self._rounds + 1
        return not busy or self._rounds >= len(lanes)


class Supervisor(threading.Thread):
    """The thread that owns the server from its start to its end.

    The kernel kills the server when the thread that started it ends, so this thread starts it.
    `settled` is set when the first start has succeeded or failed. `finished` is set when nothing
    is left of the server; wait for it instead of `join`, which considers the thread ended after
    an interrupt. `failure` is the error it ended with.
    """

    def __init__(
        self,
        start: Start,
        options: ServeOptions,
        board: Board,
        log: ServerLog,
        proxy: EnvoyProcess | None = None,
    ) -> None:
        super().__init__(name="saccade-supervisor", daemon=True)
        self._start_process = start
        self._proxy = proxy
        self._options = options
        self._board = board
        self._log = log
        self._ending = threading.Event()
        self._hurry = False
        self._hangs = False  # the whole server: it does not even report on its models
        self._left_s = 0.0  # estimated time for the work in the router's lanes
        self._down_since_s: float | None = None
        self._process: ServerProcess | None = None
        self._wanted: Replacement | None = None
        self._drains: list[Drain] = []
        self.settled = threading.Event()
        self.finished = threading.Event()
        self.failure: BaseException | None = None
        self.restarts = 0  # of the whole server
        self.reloads: Counter[str] = Counter()  # of single models whose process had died
        self.replacements = 0  # of the server by a new one, without an interruption

    @property
    def metrics_port(self) -> int:
        """Metrics port of the running server; 0 if there is none."""
        process = self._process
        return process.metrics_port if process else 0

    @property
    def pid(self) -> int:
        """Process id of the running server; 0 if there is none."""
        return self._process.pid if self._process else 0

    def stop(self, *, at_once: bool = False) -> None:
        """Request the end; with `at_once`, requests in flight are not finished."""
        self._hurry |= at_once
        self._ending.set()

    def replace(self, wanted: Replacement) -> None:
        """Request a new server in place of this one; `wanted.settled` is set when it is done."""
        if self._wanted is not None or not self.settled.is_set() or self.finished.is_set():
            wanted.fail("The server is being started, replaced or stopped. Try again later.")
        else:
            self._wanted = wanted

    def run(self) -> None:
        """Serve until told to stop, or until the server has failed too often."""
        try:
            with RunFolder() as folder:
                self._serve(folder)
            self._board.reset("stopped")
        except BaseException as error:
            self.failure = error
            self._board.reset("failed")
        finally:
            if self._proxy:
                self._proxy.stop(at_once=True)
            self._log.close()
            self.settled.set()
            self.finished.set()

    def _serve(self, folder: RunFolder) -> None:
        if self._proxy:
            self._proxy.configure(folder.path)
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
                    f"{trouble} It failed {MOST_TROUBLES + 1} times in quick succession. Its last "
                    f"lines:\n{self._log.last_lines()}"
                )
            if self._down_since_s is None:
                self._down_since_s = time.monotonic()
            due = f"in {wait_s:g} s" if wait_s else "now"
            text = f"{trouble} Restarting it {due}."
            report(logging.ERROR, "restarting", text, reason=trouble, pause_s=wait_s)
            self._board.reset("restarting")
            if self._ending.wait(wait_s):
                return
            self.restarts += 1

    def _one_life(self, folder: RunFolder) -> tuple[str | None, float]:
        """Start a server and watch it; return what went wrong, and the seconds it served."""
        self._log.forget()
        process = self._process = self._start_process(folder)
        prober = self._prober()
        served_from, self._hangs, self._left_s = None, False, 0.0
        try:
            trouble = self._wait_loaded(process, prober)
            if trouble is None and not self._ending.is_set():
                if self._proxy and not self._proxy.pid:
                    self._proxy.start()
                    self._proxy.wait_listening(self._ending.is_set)
                self._board.enter("serving")
                self.settled.set()
                served_from = time.monotonic()
                self._report_return(served_from)
            while trouble is None and not self._ending.is_set():
                trouble = self._watch(self._process, prober, folder)
                prober.close()
                prober = self._prober()  # a new prober connects to the new server
            if trouble is None and served_from is not None and not self._hangs:
                if self._proxy:
                    self._proxy.drain()
                self._finish_calls(self._process, prober)
                if self._proxy:
                    self._proxy.stop(at_once=self._hurry)
        finally:
            process, self._process = self._process, None
            prober.close()
            self._end_others()
            at_once = self._hangs or served_from is None
            process.stop(at_once=at_once or self._hurry, hurried=lambda: self._hurry)
        return trouble, 0 if served_from is None else time.monotonic() - served_from

    def _finish_calls(self, process: ServerProcess, prober: Prober) -> None:
        """Wait for the calls in flight, which the server itself does not count."""
        if not process.callers():  # the prober has not connected yet
            return
        end = time.monotonic() + max(self._options.grace_s, LEFT_TIMES * self._left_s)
        self._finish_lanes(process, prober, end)
        if process.callers() > 1:
            # Some call a variant past the router, which answers them before a probe.
            self._probes(prober, self._board.variants, end)

    def _finish_lanes(self, process: ServerProcess, prober: Prober, end: float) -> None:
        """Wait for the requests in the lanes of each of the router's processes."""
        count = max(1, len(process.stubs_of(self._board.model)))
        routers: dict[str, InFlight] = {}
        done: set[str] = set()
        while len(done) < count and (probes := self._probes(prober, (self._board.model,), end)):
            probe = probes[self._board.model]  # the server gives the probes to them in turn
            if not probe.lanes:
                return
            if routers.setdefault(probe.router, InFlight()).is_over(probe.lanes):
                done.add(probe.router)
            elif len(routers) == count:
                time.sleep(0.05)

    def _probes(self, prober: Prober, models: tuple[str, ...], end: float) -> dict[str, Probe]:
        """Return the answers of these models; none if the time, or the patience, is over."""
        for model in models:
            prober.forget(model)
            prober.ask(model)
        probes: dict[str, Probe] = {}
        while not self._hurry and (left_s := end - time.monotonic()) > 0:
            probes |= {probe.model: probe for probe in prober.answers(min(left_s, 0.1))}
            if probes.keys() >= set(models):
                return probes
        return {}

    def _report_return(self, now_s: float) -> None:
        if self._down_since_s is None:
            return
        down_s = now_s - self._down_since_s
        self._down_since_s = None
        text = f"The server answers again after {down_s:.1f} s."
        report(logging.WARNING, "server_back", text, down_s=round(down_s, 3))

    def _prober(self) -> Prober:
        place = address(self._options.host, self._options.grpc_port)
        return Prober(place, self._options.probe_timeout_s)

    def _end_others(self) -> None:
        """End all servers but the current one."""
        if wanted := self._wanted:
            wanted.fail("The server was stopped, or failed, while the new one was starting.")
            self._wanted = None
        for drain in self._drains:
            drain.process.stop(at_once=True)
        self._drains.clear()

    def _wait_loaded(self, process: ServerProcess, prober: Prober) -> str | None:
        limit = StartLimit(process.cpu_s)
        models = [*self._board.variants, self._board.model]  # that have not answered yet
        reason = "It does not report that its models are loaded."
        while not self._ending.wait(0.05):
            if ended := process.exit_text():
                return f"The server exited during its start ({ended})."
            if limit.is_over(self._options.start_timeout_s):
                passed = limit.text(self._options.start_timeout_s)
                return f"The server was not ready {passed}. {reason}"
            if not process.loaded():
                continue
            if ports := foreign_listeners(process):
                return (
                    f"Another process also listens on port {ports[0]} and would get some of the "
                    "callers. Stop it (`ss -ltnp` shows it), or choose another port."
                )
            receive_callers(process)
            process.find_stubs()
            for probe in prober.all_of(tuple(models)):
                self._board.mark(probe.model, probe.reason)
                reason = f"{probe.model}: {probe.reason}" if probe.reason else reason
                if not probe.reason:
                    models.remove(probe.model)
            if not models:
                return None
        return None

    def _watch(self, process: ServerProcess, prober: Prober, folder: RunFolder) -> str | None:
        """Return why to restart the server; None if it is to stop, or a new one took over."""
        liveness = Liveness(process, prober, self._board, self._options.probe_interval_s)
        reload = VariantReload(process, self._board, self._options.start_timeout_s)
        while not self._ending.wait(LIVENESS_INTERVAL_S):
            folder.keep_reaper()
            if self._proxy:
                self._proxy.keep()
            if trouble := self._dead(process, reload, prober):
                return trouble
            liveness.excuse(reload.down())
            trouble = liveness.look()
            self._hangs, self._left_s = liveness.hangs, liveness.left_s
            if trouble and not self._end_hung(process, liveness.silent()):
                return trouble
            self.reloads.update(reload.note_answers())
            if self._hand_over(process, folder, reload):
                return None
        return None

    def _dead(self, process: ServerProcess, reload: VariantReload, prober: Prober) -> str | None:
        if ended := process.exit_text():
            self._board.reset("restarting")
            return f"The server exited ({ended})."
        if self._options.restart:
            reload.step(prober)
            return None
        dead = process.dead_stubs()
        for stub in dead:
            self._board.mark(stub.model or self._board.model, "its process has died")
        names = ", ".join(stub.model or str(stub.pid) for stub in dead)
        return f"The process of {names} has died (out of memory, or killed)." if dead else None

    def _end_hung(self, process: ServerProcess, silent: tuple[str, ...]) -> bool:
        """Kill the processes of models that do not answer, so that they are reloaded.

        Return whether there was one. If the whole server does not answer, nothing is killed.
        """
        if self._hangs or not self._options.restart:
            return False
        stubs = [stub for model in silent for stub in process.stubs_of(model)]
        for stub in stubs:
            text = f"{stub.model} does not answer. Killing its process."
            report(logging.ERROR, "variant_ended", text, variant=stub.model)
            with suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)
        return bool(stubs)

    def _hand_over(self, process: ServerProcess, folder: RunFolder, reload: VariantReload) -> bool:
        """Advance a pending replacement by one step; return whether it has taken over."""
        if self._drains:
            self._drains = [drain for drain in self._drains if not drain.ended()]
            if not self._drains:
                receive_callers(process)  # its index changed when the old server left
                remove_other_copies(process.copy)
        if reload.count >= RELOADS_A_PROCESS and self._wanted is None and not reload.down():
            board = self._board
            self._wanted = Replacement(
                self._start_process, board.model, board.variants, board.repository
            )
        wanted = self._wanted
        if wanted is None or self._drains:
            return False
        if wanted.process is None:
            wanted.begin(folder)
        elif wanted.loaded(self._options.start_timeout_s):
            receive_callers(wanted.process)
            wanted.process.find_stubs()
            self._start_process, self._process = wanted.start, wanted.process
            self._board.describe(wanted.model, wanted.variants, wanted.repository)
            self._drains.append(Drain(process, self._options, LEFT_TIMES * self._left_s))
            self.replacements += 1
            self._wanted = None
            wanted.settled.set()
            return True
        if wanted.failure:
            text = f"{wanted.failure} The old server continues."
            report(logging.ERROR, "replacement_failed", text)
            self._wanted = None
            remove_other_copies(process.copy)
        return False
