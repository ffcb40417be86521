# SPDX-License-Identifier: Apache-2.0
"""Liveness of a running server: what is late but goes on is busy, and not dead."""

import logging
import time
from typing import Any

from saccade.machine import process_fields
from saccade.serving.client.probe import Probe, Prober
from saccade.serving.client.readiness import Board
from saccade.serving.server.json_log import event
from saccade.serving.server.process import ServerProcess

LOGGER = logging.getLogger("saccade.serve")

MISSES = 3  # times that a model is found late, and without progress, before it counts as dead
# A model that uses the CPU but ends no inference for longer than the longest legal run.
LONGEST_RUN_S = 600.0
# A server that lives and takes no connection, as without a descriptor left, has callers that hold
# them all: they may go. None of its own callers gets on either, since connections are renewed.
LONGEST_CUT_S = 60.0
IDLE_SHARE = 0.02  # of one core: less is housekeeping and not work
_TICKS_A_SECOND = 100


class Liveness:
    """Judges the probes of one life of a server.

    Progress of a model is any of: an answer, to whomever; CPU time that its process uses.
    """

    def __init__(
        self, process: ServerProcess, prober: Prober, board: Board, interval_s: float
    ) -> None:
        self._process, self._prober, self._board = process, prober, board
        self._models = (board.model, *board.variants)
        self._misses = dict.fromkeys(self._models, 0)
        self._judged_s: dict[str, float] = {}  # when a late model was last judged
        self._ticks: dict[str, tuple[float, int]] = {}  # CPU time, and when it was read
        # Spread over the interval, so that probes never come as a burst beside real requests.
        self._step_s = interval_s / len(self._models)
        self._router_step_s = interval_s / 5
        self._turn, self._next_s = 0, time.monotonic() + self._step_s
        self._next_router_s = 0.0
        self._loading: set[str] = set()
        self._server_busy, self._server_due_s = False, 0.0
        self._cut_since_s: float | None = None  # since when no probe has reached the server
        self.hangs = False  # the server as a whole: it does not even answer for its models

    def excuse(self, loading: set[str]) -> None:
        """Do not hold it against these models that they are late: they are being loaded again.

        Nor against the router, which may wait for them.
        """
        self._loading = loading
        if loading:
            self._misses |= dict.fromkeys((*loading, self._board.model), 0)

    def silent(self) -> tuple[str, ...]:
        """Models to blame for what `look` found: the variants before the router."""
        # The router may be late because a variant is, and which was asked first is chance.
        variants = [name for name in self._board.variants if self._misses[name] >= MISSES - 1]
        return tuple(variants or [name for name in self._models if self._misses[name] >= MISSES])

    def look(self) -> str | None:
        """Send what is due and judge what came back. Returns what is dead, and why."""
        reasons = {}
        for probe in self._prober.answers():
            if probe.unreachable:
                if trouble := self._cut():
                    return trouble
                continue
            self.hangs, self._cut_since_s = False, None
            self._judged_s.pop(probe.model, None)
            reasons[probe.model] = probe.reason
            if trouble := self._read_lanes(probe):
                return trouble
        reasons |= self._late()
        for model, reason in reasons.items():
            self._misses[model] = self._misses[model] + 1 if reason else 0
            if self._board.mark(model, reason) and reason:
                fields = event("variant_silent", variant=model, reason=reason)
                LOGGER.warning("%s does not answer: %s", model, reason, **fields)
            if self._misses[model] >= MISSES:
                return f"{model} does not answer: {reason}."
        self._ask()
        return None

    def _cut(self) -> str | None:
        """That no connection was to be had; whether for so long that the server has to end."""
        now = time.monotonic()
        if self._cut_since_s is None:
            LOGGER.warning("The server takes no new connection.", **event("no_connection"))
            self._cut_since_s = now
        if now - self._cut_since_s < LONGEST_CUT_S:
            return None
        self.hangs = True
        return f"The server has taken no new connection for {LONGEST_CUT_S:g} s."

    def _ask(self) -> None:
        now, due = time.monotonic(), [model for model, count in self._misses.items() if count]
        if now >= self._next_s:
            due.append(self._models[self._turn % len(self._models)])
            self._turn, self._next_s = self._turn + 1, now + self._step_s
        if now >= self._next_router_s:
            # It waits in no lane and costs next to nothing.
            due.append(self._board.model)
            self._next_router_s = now + self._router_step_s
        for model in due:
            if self._prober.ask(model):
                self._ticks[model] = now, self._used(model)[1]

    def _late(self) -> dict[str, str]:
        """Why those whose probe is late count as silent, or `""` where they only are busy."""
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
            self._board.mark_busy(model, f"late by {out_s:.1f} s, but it goes on" if busy else "")
        return late

    def _goes_on(self, model: str, out_s: float) -> bool:
        states, ticks = self._used(model)
        if "T" in states.upper():
            return False
        if not self.hangs:
            # Perhaps many others wait for this model, and it answers them.
            answers = self._prober.is_busy(model)
            self.hangs = answers is None
            if answers:
                return True
        if out_s > LONGEST_RUN_S:
            return False
        # A server that does not even answer for its models may be at work on what came before.
        return self._computes(model, ticks) or (self.hangs and self._server_computes())

    def _computes(self, name: str, ticks: int) -> bool:
        """True if CPU time went on since it was last looked at."""
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
            # Several models are judged at a time, and none may find that no time has passed.
            self._server_due_s = now + self._prober.timeout_s / 2
        return self._server_busy

    def _used(self, model: str) -> tuple[str, int]:
        """States and CPU time, in ticks, of the processes in which a model runs."""
        states, ticks = "", 0
        for stub in self._process.stubs_of(model):
            state, used = process_time(stub.pid)
            states, ticks = states + state, ticks + used
        return states, ticks

    def _read_lanes(self, probe: Probe) -> str | None:
        """Note what waits; returns which lane has stood still for longer than any legal step."""
        by_variant: dict[str, list[dict[str, Any]]] = {}
        for lane in probe.lanes:
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
            text = f"{waiting} requests wait, about {seconds:.2g} s" if waiting else ""
            self._board.mark_busy(variant, text)
        if probe.lanes:
            self._board.mark_busy(probe.model, "")
        return None


def process_time(pid: int) -> tuple[str, int]:
    """A process's state, `T` if it is stopped, and the clock ticks that it has computed.

    Nothing and none of a process that has ended.
    """
    fields = process_fields(pid)
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else ("", 0)
