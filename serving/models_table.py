# SPDX-License-Identifier: Apache-2.0
"""The answer of `saccade models` as a table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.models.catalogue import Row


def render(rows: "Sequence[Row]") -> Any:
    """A row a size: parameters, what comes in and out by part, budgets."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1))
    for heading in ("family", "size"):
        table.add_column(heading, no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for heading in ("inputs", "outputs", "budgets"):
        table.add_column(heading)
    for row in rows:
        cells = (
            row.family,
            row.name,
            f"{row.parameters:,}",
            _by_part(row.inputs),
            _by_part(row.outputs),
            f"{', '.join(row.settings)} ({row.unit})",
        )
        # As plain text: the brackets of the axes would be read as a style.
        table.add_row(*map(Text, cells))
    return table


def _by_part(tensors: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(
        (f"{role}: " if role else "") + ", ".join(names) for role, names in tensors.items()
    )
