# SPDX-License-Identifier: Apache-2.0
"""The answer of `saccade models` as a table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.models.catalogue import Row

_NOTE = "Multiply-adds: of one sample by part, counted from the graph of the first budget."


def render(rows: "Sequence[Row]") -> Any:
    """A row a size: parameters, cost, what comes in and out by part, budgets; sources once."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1), caption=_NOTE, caption_justify="left")
    for heading in ("family", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parameters", "multiply-adds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("inputs", "outputs", "budgets", "source"):
        table.add_column(heading)
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].family != row.family
        cells = (
            row.family,
            row.name,
            f"{row.parameters:,}",
            _multiply_adds(row.multiply_adds),
            _by_part(row.inputs),
            _by_part(row.outputs),
            f"{', '.join(row.settings)} ({row.unit})",
            row.source if first else "",
        )
        # As plain text: the brackets of the axes would be read as a style.
        table.add_row(*map(Text, cells))
    return table


def _multiply_adds(counts: Mapping[str, int]) -> str:
    """Three digits are enough to compare; the JSON has them all."""
    return "\n".join(
        (f"{role}: " if role else "") + _short(count) for role, count in counts.items()
    )


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _by_part(tensors: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(
        (f"{role}: " if role else "") + ", ".join(names) for role, names in tensors.items()
    )
