# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal's standard error, and silence everywhere else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from saccade.escaped import escaped_line


class Advance(Protocol):
    """Call it when a step is done; `note` replaces the text beside the bar."""

    def __call__(self, steps: float = 1, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: float) -> Iterator[Advance]:
    """Show how far `label` has come of `total` steps, if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(label, total=total, note="")

        def advance(steps: float = 1, note: str = "") -> None:
            if note:
                bar.update(task, note=escaped_line(note))
            bar.update(task, advance=steps)

        yield advance
