# SPDX-License-Identifier: Apache-2.0
"""An evaluation as a table for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from saccade.models.scores.results import Found, Score

if TYPE_CHECKING:
    from rich.table import Table


def render(found: Sequence[Found]) -> "Table":
    """A row for each score of each variant, with its 95 % interval."""
    from rich import box
    from rich.table import Table

    first = found[0]
    how = f" ({first.protocol})" if first.protocol else ""
    ops = next((each.ops for each in found if each.ops), None)
    note = f"Custom ops by {ops}." if ops else None
    title = f"{first.task} on {first.data}{how}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), caption=note, caption_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("score")
    for heading in ("value", "95 %", "n"):
        table.add_column(heading, justify="right")
    for each in found:
        for index, score in enumerate(each.scores):
            name = each.variant if index == 0 else ""
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
