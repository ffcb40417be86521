# SPDX-License-Identifier: Apache-2.0
"""Reloads of single models whose process has died, while the others answer."""

import logging
import time
from dataclasses import dataclass, field

from saccade.serving.client.probe import Prober
from saccade.serving.client.readiness import Board
from saccade.serving.server.json_log import event
from saccade.serving.server.process import ServerProcess
from saccade.serving.server.start_limit import StartLimit
from saccade.serving.server.stubs import Stub

LOGGER = logging.getLogger("saccade.serve")

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
            if model.limit and model.due_s is None and model.limit.is_over(self._load_timeout_s):
                fields = event("variant_not_loaded", variant=name)
                LOGGER.error("%s was not reloaded in time.", name, **fields)
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
            fields = event("variant_back", variant=name, down_s=round(down_s, 3))
            LOGGER.warning("%s answers again after %.1f s.", name, down_s, **fields)
            for stub in model.gone:
                self._process.abandon(stub)
            model.gone.clear()
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
        if name == self._board.model:
            LOGGER.error(
                "The router of %s has died (out of memory, or killed). It is reloaded %s; until "
                "then, no variant answers.",
                name,
                due,
                **event("router_died", model=name, pause_s=pause_s),
            )
            return
        LOGGER.error(
            "The process of %s has died (out of memory, or killed). It is reloaded %s; "
            "the other models still answer.",
            name,
            due,
            **event("variant_died", variant=name, pause_s=pause_s),
        )

    def _plan(self, model: _Model) -> float:
        pause_s = 0.0 if model.deaths == 0 else min(LONGEST_PAUSE_S, 2.0 ** (model.deaths - 1))
        model.deaths += 1
        model.due_s, model.came_up = time.monotonic() + pause_s, False
        return pause_s
