# SPDX-License-Identifier: Apache-2.0
"""Progress of a verb: a bar on a terminal, lines in a log, or calls to your own function.

Every verb that takes long has a `progress` argument: a function that is called with each `Step`,
None for no output, or the default, `bar`.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.core.escaping import escaped_line
from saccade.core.sizes import time_text
from saccade.core.verbosity import is_quiet

LOGGER = logging.getLogger("saccade.progress")
_LOGGED_S = 2.0  # between two log lines about the same work
_LINE_S = 30.0  # between two lines where there is no terminal


@dataclass(frozen=True)
class Step:
    """Progress of `label`: `done` of `total` steps, and a note about the current work."""

    label: str
    done: float
    total: float
    note: str
    seconds: float  # since the first step began

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time at the pace so far; None before the first step is done."""
        if self.done <= 0:
            return None
        return self.seconds * max(0.0, self.total - self.done) / self.done


Report = Callable[[Step], None]


class Advance(Protocol):
    """Function to call when a step is done; `note` replaces the text next to the bar."""

    def __call__(self, steps: float = 1, note: str = "") -> None: ...


def silent(steps: float = 1, note: str = "") -> None:
    """Report no progress; an `Advance` that does nothing."""


def bar(step: Step) -> None:
    """Show a bar with the remaining time on standard error; the default.

    Where that is not a terminal, print a line about every half a minute.
    """
    raise AssertionError("progress_of draws it itself")


_REPORT: ContextVar[Report | None] = ContextVar("saccade_progress", default=bar)


def part_of(advance: Advance, steps: float, total: int, note: str) -> Callable[[int], None]:
    """Return a function that advances by a share of `steps`, given how many items more are done."""
    seen = 0

    def done(count: int) -> None:
        nonlocal seen
        seen += count
        advance(steps * count / total, f"{note}, {seen} of {total}")

    advance(0, note)
    return done


def pace(done: float, began_s: float) -> str:
    """Return how much is done per second, as text; `began_s` is a time of `time.monotonic`."""
    rate = done / max(1e-9, time.monotonic() - began_s)
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class StepCounter:
    """An `Advance` for one piece of work, which counts its steps and adds a heading to notes."""

    def __init__(self, advance: Advance, heading: str) -> None:
        self._advance, self._heading, self._done = advance, heading, 0.0
        advance(0, heading)

    def __call__(self, steps: float = 1, note: str = "") -> None:
        self._done += steps
        self._advance(steps, f"{self._heading}: {note}" if note else "")

    def up_to(self, steps: float) -> None:
        """Advance to this step, even if part of the work was not needed."""
        self._advance(steps - self._done, self._heading)
        self._done = steps


@contextmanager
def reporting(report: Report | None) -> Iterator[None]:
    """Call `report` with every step of the work in the block; `bar` changes nothing."""
    token = _REPORT.set(_REPORT.get() if report is bar else report)
    try:
        yield
    finally:
        _REPORT.reset(token)


@contextmanager
def progress_of(label: str, total: float) -> Iterator[Advance]:
    """Report the progress of `label` towards `total` steps."""
    report = _REPORT.get()
    if report is bar:
        with _drawn(label, total) as draw:
            yield _advance(label, total, draw)
    else:
        yield _advance(label, total, report)


def _advance(label: str, total: float, report: Report | None) -> Advance:
    began, done, text = time.monotonic(), 0.0, ""
    logged: list[Any] = ["", began]

    def advance(steps: float = 1, note: str = "") -> None:
        nonlocal done, text
        done = round(done + steps, 9)  # so that three thirds of a step make a whole one
        text = note or text
        # Many passes have one sample per step: log a new pass immediately, its samples rarely.
        now, what = time.monotonic(), text.rpartition(", ")[0] or text
        if what != logged[0] or now - logged[1] > _LOGGED_S:
            logged[:] = [what, now]
            LOGGER.debug("%s, %.0f %%: %s", label, 100 * done / total if total else 100, text)
        if report is not None:
            report(Step(label, done, total, text, time.monotonic() - began))

    return advance


@contextmanager
def _drawn(label: str, total: float) -> Iterator[Report | None]:
    if is_quiet():
        yield None
        return
    if not sys.stderr.isatty():
        yield _lines()
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


def _lines() -> Report:
    """Return a report for logs, so that nobody takes long work for a hanging process."""
    printed_s = 0.0

    def line(step: Step) -> None:
        nonlocal printed_s
        if step.seconds - printed_s < _LINE_S:
            return
        printed_s = step.seconds
        share = f"{100 * step.done / step.total:.0f} %" if step.total else ""
        left = step.seconds_left
        remaining = "" if left is None else f"about {time_text(left)} left"
        words = ", ".join(filter(None, (share, remaining, escaped_line(step.note))))
        print(f"{step.label}: {words}", file=sys.stderr, flush=True)

    return line
