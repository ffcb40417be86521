# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures as tables, a picture and a page, all made from one JSON object.

`python -m saccade.serving.bench.report build/report/report.json` draws picture and page again.
"""

import base64
import html
import json
import string
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from saccade import limits
from saccade.errors import SaccadeError
from saccade.escaped import escaped
from saccade.files import read_bounded, write_atomically
from saccade.json_text import parse_json
from saccade.serving.bench.figures import (
    cost_of,
    is_share,
    ops_text,
    saves_bytes,
    score_text,
    shown,
    throughput_of,
)
from saccade.serving.bench.picture import frontier_png
from saccade.serving.bench.report_tables import WORDS, Table, count, tables

SCHEMA = "saccade.report"
VERSION = 2
_NEAR = 0.03  # of a share, or else of the largest variant's score: counts as little


def render(report: dict[str, Any]) -> Any:
    """The tables for a terminal, as one rich renderable."""
    import rich.box
    import rich.table
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for table in tables(report):
        shown = rich.table.Table(
            title=table.title, caption=table.note or None, box=rich.box.SIMPLE_HEAD, pad_edge=False,
            collapse_padding=True,
            title_justify="left", caption_justify="left", title_style="bold", header_style="",
        )  # fmt: skip
        for index, column in enumerate(table.columns):
            words = index == 0 or column in WORDS
            shown.add_column(
                column,
                justify="left" if words else "right",
                no_wrap=index == 0,
                overflow="fold",
            )
        for row in table.rows:
            shown.add_row(*row)
        parts += [shown, ""]
    return Group(*parts, Text(summary(report)))


def summary(report: dict[str, Any]) -> str:
    """Summary of where and on what the figures were taken, in one sentence each."""
    machine, data = report["machine"], report["data"]
    served = f"; server: {report['server']}" if report["server"] else "; without a server"
    ops = f", {text}" if (text := ops_text(report)) else ""
    return (
        f"{report['model']} on the test split of {data['name']} ({data['n']} samples). "
        f"{machine['runtime']}, one thread{ops}, on {machine['device']}{served}. {report['date']}."
    )


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, frontier.png and report.html into an existing folder."""
    compact = json.dumps(report, sort_keys=True, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / "report.json", (compact + "\n").encode())
    draw(report, folder)


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write frontier.png and report.html, which needs nothing beside itself."""
    picture = frontier_png(report)
    write_atomically(folder / "frontier.png", picture)
    write_atomically(folder / "report.html", page(report, picture).encode())


def _escaped(text: str) -> str:
    # A page shows a turned order of letters as a terminal does.
    return html.escape(escaped(text))


def page(report: dict[str, Any], picture: bytes) -> str:
    """The report as one HTML page with the picture inside it."""
    template = string.Template(
        resources.files("saccade.serving.bench").joinpath("report.html").read_text("utf-8")
    )
    return template.substitute(
        title=_escaped(f"{report['model']} on {report['data']['name']}"),
        summary=_escaped(summary(report)),
        headline=_escaped(headline(report)),
        picture=base64.b64encode(picture).decode(),
        alt=_escaped(_alternative(report)),
        tables="\n".join(_html_table(table) for table in tables(report)),
        machine=_escaped(json.dumps(report["machine"], indent=1, sort_keys=True)),
    )


def headline(report: dict[str, Any]) -> str:
    """The cheapest variant that gives up little, against the largest."""
    variants = report["variants"]
    kept = [variant for variant in variants if variant["dominated_by"] is None]
    what = "bytes of an embedding" if saves_bytes(variants[0]) else "throughput"
    standing = f"{len(kept)} of {len(variants)} variants are on the frontier of score and {what}."
    if failed := len(report.get("failed", ())):
        standing += f" {failed} point{'s' if failed > 1 else ''} failed: see below."
    full = variants[0]
    score = full["score"]
    sign = 1 if score["higher_is_better"] else -1
    little = _NEAR if is_share(score) else _NEAR * abs(score["value"])

    def lost(variant: dict[str, Any]) -> float:
        return sign * float(score["value"] - variant["score"]["value"])

    others = [variant for variant in kept if variant is not full]
    near = [variant for variant in others if lost(variant) <= little]
    if not near:
        most = f"{_difference(score, little)} of {full['variant']}"
        return f"{standing} No other scores within {most}." if others else standing
    if saves_bytes(full):
        small = min(near, key=cost_of)
        gain = f"an embedding {cost_of(full) / cost_of(small):.1f} times smaller than that"
    else:
        small = max(near, key=cost_of)
        gain = f"{cost_of(small) / cost_of(full):.1f} times the throughput"
    lower = sign * lost(small) >= 0
    return (
        f"{standing} {small['variant']} keeps {small['kept']} of {small['total']} "
        f"{small['unit']}: {gain} of {full['variant']}, score {_difference(score, lost(small))} "
        f"{'lower' if lower else 'higher'}."
    )


def _difference(score: dict[str, Any], value: float) -> str:
    """Difference of two values of that score."""
    apart = abs(shown(score, value))
    return f"{apart:.1f} points" if is_share(score) else f"{apart:.3f}"


def _alternative(report: dict[str, Any]) -> str:
    def words(variant: dict[str, Any]) -> str:
        place = (
            f"{variant['embedding_bytes']:,} bytes an embedding"
            if saves_bytes(variant)
            else f"{count(throughput_of(variant)[0])} per second"
        )
        return f"{variant['variant']} {score_text(variant['score'])} at {place}" + (
            " (dominated)" if variant["dominated_by"] else ""
        )

    return "Score against cost: " + "; ".join(words(variant) for variant in report["variants"])


def _html_table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{_aligned(column)}>{_escaped(column)}</th>' for column in table.columns
    )
    body = "\n".join(
        f'<tr><th scope="row">{_escaped(row[0])}</th>'
        + "".join(map(_html_cell, table.columns[1:], row[1:]))
        + "</tr>"
        for row in table.rows
    )
    note = f"<p>{_escaped(table.note)}</p>" if table.note else ""
    return (
        f'<section><h2>{_escaped(table.title)}</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>"
    )


def _html_cell(column: str, cell: str) -> str:
    return f"<td{_aligned(column)}>{_escaped(cell)}</td>"


def _aligned(column: str) -> str:
    return ' class="words"' if column in WORDS else ""


def read_report(path: Path) -> dict[str, Any]:
    """A report.json as written by `write_report`.

    Raises: SaccadeError for a missing or foreign file, and for an unknown version.
    """
    try:
        report = parse_json(read_bounded(path, limits.JSON_BYTES))
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: cannot be read ({error}). Write it with: saccade bench"
        ) from error
    version = (report.get("schema"), report.get("version")) if isinstance(report, dict) else None
    if version != (SCHEMA, VERSION):
        raise SaccadeError(
            f"{path}: is {version}, expected {(SCHEMA, VERSION)}. Write it with: saccade bench"
        )
    return dict(report)


def draw_again(path: Path) -> None:
    """Picture and page beside a report.json, from it alone.

    Raises: SaccadeError for what `read_report` refuses, and for a report that lacks something.
    """
    report = read_report(path)
    try:
        draw(report, path.parent)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SaccadeError(
            f"{path}: is damaged or was edited ({error!r:.100}). Write it with: saccade bench"
        ) from error


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            draw_again(Path(name))
    except SaccadeError as error:
        sys.exit(str(error))
