# SPDX-License-Identifier: Apache-2.0
"""Show an evaluation as a table in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from saccade.models.scores.results import EvaluationResult, Score

if TYPE_CHECKING:
    from rich.table import Table


def render(results: Sequence[EvaluationResult]) -> "Table":
    """Return a table with a row per score of each variant, with its 95 % interval."""
    from rich import box
    from rich.table import Table

    first = results[0]
    how = f" ({first.protocol})" if first.protocol else ""
    ops = next((result.ops for result in results if result.ops), None)
    notes = [f"Custom ops by {ops}."] if ops else []
    if first.skipped:
        rows = "row" if first.skipped == 1 else "rows"
        notes.append(f"{first.skipped} unreadable {rows} left out.")
    note = " ".join(notes) or None
    split = f", split {first.split}" if first.split else ""
    title = f"{first.task} on {first.data}{split}{how}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), caption=note, caption_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("score")
    for heading in ("value", "95 %", "n"):
        table.add_column(heading, justify="right")
    for result in results:
        for index, score in enumerate(result.scores):
            name = result.variant if index == 0 else ""
            table.add_row(name, score.name, *_figures(score), str(score.n))
    return table


def _figures(score: Score) -> tuple[str, str]:
    interval = "-"
    if score.unit == "share":
        if score.interval is not None:
            interval = " to ".join(f"{100 * bound:.1f}" for bound in score.interval)
        return f"{100 * score.value:.2f} %", interval
    if score.interval is not None:
        interval = " to ".join(f"{bound:.4g}" for bound in score.interval)
    return f"{score.value:.4g}", interval
