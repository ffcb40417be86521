# SPDX-License-Identifier: Apache-2.0
"""A table of a report, before a terminal or a page draws it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Headings and cells as text; the first column names the variant."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
