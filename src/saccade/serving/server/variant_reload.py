# SPDX-License-Identifier: Apache-2.0
"""Models whose process has died, each loaded again by itself while the others answer."""

import logging
import time
from dataclasses import dataclass, field

from saccade.serving.client.probe import Prober
from saccade.serving.client.readiness import Board
from saccade.serving.server.json_log import event
from saccade.serving.server.process import ServerProcess
from saccade.serving.server.stubs import Stub

LOGGER = logging.getLogger("saccade.serve")

CALM_S = 60  # of answers, after which a death counts as the first one again
LONGEST_PAUSE_S = 60.0
DIED = "its process has died; it is being loaded again"


@dataclass
class _Model:
    deaths: int = 0  # without a minute of answers between them
    died_s: float = 0
    back_s: float = 0
    due_s: float | None = None  # when it is loaded, None while it is being loaded
    given_up_s: float = 0  # when a load that shows nothing is made again
    gone: list[Stub] = field(default_factory=list)
    down: bool = False
    came_up: bool = False


class VariantReload:
    """Watches the stubs of one server process; `step` is called a few times a second.

    Nothing waits here. After the first death a model is loaded at once, after further ones with
    pauses of 1, 2, 4 up to 60 s, so that one that dies of every request costs the others little.
    """

    def __init__(self, process: ServerProcess, board: Board, load_timeout_s: float) -> None:
        self._process = process
        self._board = board
        self._load_timeout_s = load_timeout_s
        self._models: dict[str, _Model] = {}
        self.count = 0  # models that were loaded again

    def down(self) -> set[str]:
        """Models that do not answer since their process died."""
        return {name for name, model in self._models.items() if model.down}

    def step(self, prober: Prober) -> None:
        """Note who died, load who is due, ask who is down."""
        for stub in self._process.dead_stubs():
            self._note(stub)
            prober.forget(stub.model)
        now = time.monotonic()
        for name in self.down():
            model = self._models[name]
            if model.due_s is not None and now >= model.due_s:
                self._process.load_again(name)
                model.due_s, model.given_up_s = None, now + self._load_timeout_s
            elif model.due_s is None and not model.came_up:
                model.came_up = self._process.new_stubs(name)
            if not model.came_up:
                # An answer from before its death must not pass for one from after it.
                self._board.mark(name, DIED)
            if model.due_s is None and now > model.given_up_s:
                fields = event("variant_not_loaded", variant=name)
                LOGGER.error("%s was not loaded again in time.", name, **fields)
                self._plan(model)
            if model.came_up:
                prober.ask(name)

    def note_answers(self) -> list[str]:
        """See by the probes who is back. Returns their names."""
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
            LOGGER.warning("%s answers again, after %.1f s.", name, down_s, **fields)
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
            # Of several instances of a model all are loaded anew, and none of the old is kept.
            model.gone += self._process.stubs_of(name)
        self._process.abandon(stub)
        self._board.mark(name, DIED)
        if not model.down or model.came_up:
            pause_s = self._plan(model)
            LOGGER.error(
                "The process of %s has died (out of memory, or killed). It is loaded again %s; "
                "the others answer.",
                name,
                f"in {pause_s:g} s" if pause_s else "now",
                **event("variant_died", variant=name, pause_s=pause_s),
            )
        model.down, model.came_up = True, False

    def _plan(self, model: _Model) -> float:
        pause_s = 0.0 if model.deaths == 0 else min(LONGEST_PAUSE_S, 2.0 ** (model.deaths - 1))
        model.deaths += 1
        model.due_s, model.came_up = time.monotonic() + pause_s, False
        return pause_s
