# SPDX-License-Identifier: Apache-2.0
"""A choice as text and table for a terminal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.serving.sweep.choice import Choice

_COLUMNS = ("variant", "budget", "score", "at least", "per second", "p95 ms", "MiB", "bytes", "")


def render(choice: "Choice") -> Any:
    """What was chosen and why, what would change it, and every variant's figures."""
    import rich.box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="")
    # Only where a budget saves bytes of an embedding.
    bytes_saved = any(each["embedding_bytes"] is not None for each in choice.variants)
    shown = [index for index, name in enumerate(_COLUMNS) if name != "bytes" or bytes_saved]
    for index in shown:
        words = index in (0, len(_COLUMNS) - 1)
        table.add_column(_COLUMNS[index], justify="left" if words else "right", no_wrap=index == 0)
    for each in choice.variants:
        row = _row(each, choice)
        table.add_row(*(row[index] for index in shown))
    return Group(Text("\n".join(_lines(choice))), "", table)


def _lines(choice: "Choice") -> list[str]:
    if choice.chosen is None:
        lines = [f"{choice.why}."]
    else:
        lines = [f"{choice.chosen}: {choice.why}."]
        if choice.runner_up is not None:
            lines.append(f"Without it: {choice.runner_up}.")
    flag = f"--{choice.parameter.replace('_', '-')}"
    for change in choice.changes:
        lines.append(f"{flag} {change['when']} {change['value']:g}: {change['variant'] or 'none'}.")
    if choice.measured_on is not None:
        lines.append(f"Measured on {choice.measured_on}.")
    return lines


def _row(each: dict[str, Any], choice: "Choice") -> tuple[str, ...]:
    mark = {choice.chosen: "chosen", choice.runner_up: "without it"}.get(each["variant"], "")
    if not mark and each["dominated_by"]:
        mark = f"dominated by {each['dominated_by']}"
    memory = each["memory_bytes"]
    rate = each["inferences_per_second"]
    return (
        each["variant"],
        f"{each['budget']:g}",
        _number(each["score"], ".4f"),
        _number(each["lower_bound"], ".4f"),
        _number(rate, ",.0f" if rate and rate >= 10 else ".2g"),
        _number(each["p95_ms"], ".2f"),
        _number(memory and memory / 2**20, ".1f"),
        _number(each["embedding_bytes"], ",d"),
        mark,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
