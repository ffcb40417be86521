# SPDX-License-Identifier: Apache-2.0
"""How far a verb has come: a bar on a terminal's standard error, or a callable of the caller.

Every verb that takes long has `progress`: a callable that is given each `Step`, None for silence,
or the default, `bar`.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.escaped import escaped_line
from saccade.verbosity import is_quiet

LOGGER = logging.getLogger("saccade.progress")


@dataclass(frozen=True)
class Step:
    """How far `label` has come: `done` of `total` steps, and what is being worked on."""

    label: str
    done: float
    total: float
    note: str
    seconds: float  # since the first step began

    @property
    def seconds_left(self) -> float | None:
        """Time that the rest takes at the pace so far; None before anything is done."""
        if self.done <= 0:
            return None
        return self.seconds * max(0.0, self.total - self.done) / self.done


Report = Callable[[Step], None]


class Advance(Protocol):
    """Call it when a step is done; `note` replaces the text beside the bar."""

    def __call__(self, steps: float = 1, note: str = "") -> None: ...


def silent(steps: float = 1, note: str = "") -> None:
    """An `Advance` that nobody looks at."""


def bar(step: Step) -> None:
    """The default of `progress=`: a bar with the time left, where standard error is a terminal."""
    raise AssertionError("progress draws it itself")


@contextmanager
def progress(label: str, total: float, report: Report | None = bar) -> Iterator[Advance]:
    """Report how far `label` has come of `total` steps."""
    if report is bar:
        with _drawn(label, total) as draw:
            yield _advance(label, total, draw)
    else:
        yield _advance(label, total, report)


def _advance(label: str, total: float, report: Report | None) -> Advance:
    began, done, text = time.monotonic(), 0.0, ""

    def advance(steps: float = 1, note: str = "") -> None:
        nonlocal done, text
        done += steps
        if note and note != text:
            text = note
            LOGGER.debug("%s, %.0f %%: %s", label, 100 * done / total if total else 100, note)
        if report is not None:
            report(Step(label, done, total, text, time.monotonic() - began))

    return advance


@contextmanager
def _drawn(label: str, total: float) -> Iterator[Report | None]:
    if is_quiet() or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task: Any = shown.add_task(label, total=total, note="")
        yield lambda step: shown.update(task, completed=step.done, note=escaped_line(step.note))
