# SPDX-License-Identifier: Apache-2.0
"""Liveness of a running server: a model that is late but makes progress is busy, not dead."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from saccade.core.machine import process_fields
from saccade.core.sizes import counted
from saccade.serving.client.readiness import Board, Probe, Prober
from saccade.serving.server.log import report
from saccade.serving.server.process import ServerProcess, StartLimit, Stub

MISSES = 3  # times that a model is late and makes no progress before it counts as dead
# A model that uses the CPU but finishes no inference for longer than the longest legal run.
LONGEST_RUN_S = 600.0
# A live server that accepts no connection, for example because it has no file descriptors left,
# may recover when callers leave. Its callers fail too meanwhile, since connections are renewed.
LONGEST_CUT_S = 60.0
IDLE_SHARE = 0.02  # of one core: less is housekeeping, not work
# Between two probes of a model, at least this many times what one takes: the model has other work.
REST_TIMES = 20.0
_TICKS_A_SECOND = 100


class Liveness:
    """Judges the probes of one run of a server.

    A model makes progress if it answers any caller as often as its batches allow, or if its process
    uses CPU time.
    """

    def __init__(
        self, process: ServerProcess, prober: Prober, board: Board, interval_s: float
    ) -> None:
        self._process, self._prober, self._board = process, prober, board
        self._models = (board.model, *board.variants)
        self._misses = dict.fromkeys(self._models, 0)
        self._judged_s: dict[str, float] = {}  # when a late model was last judged
        self._ticks: dict[str, tuple[float, int]] = {}  # CPU time, and when it was read
        # Spread over the interval, so that probes never arrive in a burst with real requests.
        self._step_s = interval_s / len(self._models)
        self._router_step_s = interval_s / 5
        self._turn, self._next_s = 0, time.monotonic() + self._step_s
        self._next_router_s = 0.0
        self._rested_s: dict[str, float] = {}  # when a model may be probed again in its turn
        self._loading: set[str] = set()
        self._server_busy, self._server_due_s = False, 0.0
        self._cut_since_s: float | None = None  # since when no probe has reached the server
        self.hangs = False  # the whole server: it does not even report on its models
        self._lanes: dict[str, tuple[dict[str, Any], ...]] = {}  # by process of the router
        self.left_s = 0.0  # estimated time for all work in the router's lanes

    def excuse(self, loading: set[str]) -> None:
        """Allow these models to be late, because they are being reloaded.

        The router may be late too, because it may be waiting for them.
        """
        self._loading = loading
        if loading:
            self._misses |= dict.fromkeys((*loading, self._board.model), 0)

    def silent(self) -> tuple[str, ...]:
        """Models to blame for what `look` found; the variants come before the router."""
        # The router may be late because a variant is late; the order of probes is random.
        variants = [name for name in self._board.variants if self._misses[name] >= MISSES - 1]
        return tuple(variants or [name for name in self._models if self._misses[name] >= MISSES])

    def look(self) -> str | None:
        """Send the due probes and judge the answers; return what is dead, and why."""
        reasons = {}
        for probe in self._prober.answers():
            if probe.unreachable:
                if trouble := self._cut():
                    return trouble
                continue
            self.hangs, self._cut_since_s = False, None
            self._judged_s.pop(probe.model, None)
            self._rested_s[probe.model] = time.monotonic() + REST_TIMES * probe.seconds
            reasons[probe.model] = probe.reason
            if trouble := self._read_lanes(probe):
                return trouble
        reasons |= self._late()
        for model, reason in reasons.items():
            self._misses[model] = self._misses[model] + 1 if reason else 0
            if self._board.mark(model, reason) and reason:
                text = f"{model} does not answer: {reason}"
                report(logging.WARNING, "variant_silent", text, variant=model, reason=reason)
            if self._misses[model] >= MISSES:
                return f"{model} does not answer: {reason}."
        self._ask()
        return None

    def _cut(self) -> str | None:
        """Note that no connection was possible; return a reason if that lasted too long."""
        now = time.monotonic()
        if self._cut_since_s is None:
            text = "The server accepts no new connections."
            report(logging.WARNING, "no_connection", text)
            self._cut_since_s = now
        if now - self._cut_since_s < LONGEST_CUT_S:
            return None
        self.hangs = True
        return f"The server has accepted no new connection for {LONGEST_CUT_S:g} s."

    def _ask(self) -> None:
        now, due = time.monotonic(), [model for model, count in self._misses.items() if count]
        if now >= self._next_s:
            turn = self._models[self._turn % len(self._models)]
            due += [turn] if now >= self._rested_s.get(turn, 0.0) else []
            self._turn, self._next_s = self._turn + 1, now + self._step_s
        if now >= self._next_router_s:
            # This probe waits in no lane and costs almost nothing.
            due.append(self._board.model)
            self._next_router_s = now + self._router_step_s
        for model in due:
            if self._prober.ask(model):
                self._ticks[model] = now, self._used(model)[1]

    def _late(self) -> dict[str, str]:
        """Return why models with a late probe count as silent, or `""` if they are only busy."""
        late = {}
        for model, out_s in self._prober.late().items():
            now = time.monotonic()
            if model in self._loading:
                continue
            if now - self._judged_s.get(model, 0.0) < self._prober.timeout_s:
                continue
            self._judged_s[model] = now
            busy = self._goes_on(model, out_s)
            late[model] = "" if busy else self._prober.late_probe(model).reason
            text = f"late by {out_s:.1f} s, but making progress" if busy else ""
            self._board.mark_busy(model, text)
        return late

    def _goes_on(self, model: str, out_s: float) -> bool:
        states, ticks = self._used(model)
        if "T" in states.upper():
            return False
        if not self.hangs:
            # Perhaps it is answering many other requests, or a batch takes it so long.
            at_work = self._prober.is_at_work(model)
            self.hangs = at_work is None
            # The others of several processes answer, even if the one with the probe never does.
            if at_work and (len(states) < 2 or out_s <= LONGEST_RUN_S):
                return True
        if out_s > LONGEST_RUN_S:
            return False
        # A server that does not even report on its models may be busy with earlier requests.
        return self._computes(model, ticks) or (self.hangs and self._server_computes())

    def _computes(self, name: str, ticks: int) -> bool:
        """Return True if the CPU time has increased since the last call."""
        now = time.monotonic()
        since, before = self._ticks.get(name, (now, ticks))
        self._ticks[name] = now, ticks
        return (ticks - before) / _TICKS_A_SECOND > IDLE_SHARE * (now - since)

    def _server_computes(self) -> bool:
        now = time.monotonic()
        if now >= self._server_due_s:
            state, ticks = process_time(self._process.pid)
            if state:
                self._server_busy = self._computes("", ticks) and state != "T"
            # Several models are judged at the same time; for none may the elapsed time be zero.
            self._server_due_s = now + self._prober.timeout_s / 2
        return self._server_busy

    def _used(self, model: str) -> tuple[str, int]:
        """Return the states and the CPU time, in ticks, of the processes of a model."""
        states, ticks = "", 0
        for stub in self._process.stubs_of(model):
            state, used = process_time(stub.pid)
            states, ticks = states + state, ticks + used
        return states, ticks

    def _read_lanes(self, probe: Probe) -> str | None:
        """Note what is waiting; return which lane made no progress for longer than any step."""
        if not probe.lanes:
            return None
        self._lanes[probe.router] = probe.lanes
        every = [lane for lanes in self._lanes.values() for lane in lanes]
        by_variant: dict[str, list[dict[str, Any]]] = {}
        for lane in every:
            by_variant.setdefault(str(lane["variant"]), []).append(lane)
        for variant, lanes in by_variant.items():
            for lane in lanes:
                if lane["step_s"] > lane["longest_step_s"]:
                    return (
                        f"The router's lane of {variant} has made no progress for "
                        f"{lane['step_s']:.0f} s; its longest step takes "
                        f"{lane['longest_step_s']:.0f} s."
                    )
            waiting = sum(int(lane["waiting"]) for lane in lanes)
            seconds = max(float(lane["waiting_s"]) for lane in lanes)
            queue = f"{counted(waiting, 'request')} waiting, about {seconds:.2g} s"
            text = queue if waiting else ""
            self._board.mark_busy(variant, text)
        self._board.mark_busy(probe.model, "")
        self.left_s = max(float(lane["waiting_s"]) for lane in every)
        return None


def process_time(pid: int) -> tuple[str, int]:
    """Return a process's state (`T` if it is stopped) and the clock ticks it has used.

    For a process that has exited, return an empty state and 0.
    """
    fields = process_fields(pid)
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else ("", 0)


CALM_S = 60  # seconds of answers after which a death counts as the first one again
LONGEST_PAUSE_S = 60.0
DIED = "its process has died; it is being reloaded"


@dataclass
class _Model:
    deaths: int = 0  # with less than a minute of answers between them
    died_s: float = 0
    back_s: float = 0
    due_s: float | None = None  # when to load it; None while it is being loaded
    limit: StartLimit | None = None  # when to repeat a load that had no effect
    gone: list[Stub] = field(default_factory=list)
    down: bool = False
    came_up: bool = False


class VariantReload:
    """Watches the stubs of one server process; `step` is called a few times per second.

    Nothing blocks. After its first death, a model is reloaded immediately; after further ones,
    with pauses of 1, 2, 4 up to 60 s, so that a model that dies with every request costs the
    others little.
    """

    def __init__(self, process: ServerProcess, board: Board, load_timeout_s: float) -> None:
        self._process = process
        self._board = board
        self._load_timeout_s = load_timeout_s
        self._models: dict[str, _Model] = {}
        self.count = 0  # number of reloads

    def down(self) -> set[str]:
        """Return the models that have not answered since their process died."""
        return {name for name, model in self._models.items() if model.down}

    def step(self, prober: Prober) -> None:
        """Note which models died, load those that are due, probe those that are down."""
        for stub in self._process.dead_stubs():
            self._note(stub)
            prober.forget(stub.model)
        now = time.monotonic()
        for name in self.down():
            model = self._models[name]
            was_up = model.came_up
            if model.due_s is not None and now >= model.due_s:
                self._process.load_again(name)
                model.due_s, model.limit = None, StartLimit(self._process.cpu_s)
            elif model.due_s is None and not model.came_up:
                model.came_up = self._process.new_stubs(name)
            if not was_up:
                # Only an answer to a probe that is sent to the new process counts.
                self._board.mark(name, DIED)
                if model.came_up:
                    prober.forget(name)
                    for stub in model.gone:  # an old one that lives would answer the probe
                        self._process.abandon(stub)
                    model.gone.clear()
            if model.limit and model.due_s is None and model.limit.is_over(self._load_timeout_s):
                text = f"{name} was not reloaded in time."
                report(logging.ERROR, "variant_not_loaded", text, variant=name)
                self._plan(model)
            if model.came_up:
                prober.ask(name)

    def note_answers(self) -> list[str]:
        """Return the names of models that answer their probes again."""
        back, answering = [], self._board.answering()
        for name in self.down() & answering:
            model = self._models[name]
            if not model.came_up:
                continue
            model.down, model.back_s = False, time.monotonic()
            self.count += 1
            back.append(name)
            down_s = model.back_s - model.died_s
            text = f"{name} answers again after {down_s:.1f} s."
            report(logging.WARNING, "variant_back", text, variant=name, down_s=round(down_s, 3))
        return back

    def _note(self, stub: Stub) -> None:
        name, now = stub.model, time.monotonic()
        model = self._models.setdefault(name, _Model())
        if not model.down:
            model.died_s = now
            if now - model.back_s > CALM_S:
                model.deaths = 0
            # If a model has several instances, all are reloaded, and no old one is kept.
            model.gone += self._process.stubs_of(name)
        self._process.abandon(stub)
        self._board.mark(name, DIED)
        if not model.down or model.came_up:
            self._report_death(name, self._plan(model))
        model.down, model.came_up = True, False

    def _report_death(self, name: str, pause_s: float) -> None:
        due = f"in {pause_s:g} s" if pause_s else "now"
        died = "has died (out of memory, or killed). It is reloaded"
        if name == self._board.model:
            text = f"The router of {name} {died} {due}; until then, no variant answers."
            report(logging.ERROR, "router_died", text, model=name, pause_s=pause_s)
        else:
            text = f"The process of {name} {died} {due}; the other models still answer."
            report(logging.ERROR, "variant_died", text, variant=name, pause_s=pause_s)

    def _plan(self, model: _Model) -> float:
        pause_s = 0.0 if model.deaths == 0 else min(LONGEST_PAUSE_S, 2.0 ** (model.deaths - 1))
        model.deaths += 1
        model.due_s, model.came_up = time.monotonic() + pause_s, False
        return pause_s
