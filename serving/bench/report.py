# SPDX-License-Identifier: Apache-2.0
"""Show a benchmark's figures as tables, an image and a page, all from one JSON object.

`python -m saccade.serving.bench.report build/report/report.json` draws the image and the page
again.
"""

import json
import sys
from pathlib import Path
from typing import Any

from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.files import write_atomically
from saccade.core.schema import read_json
from saccade.serving.bench.figures import (
    cost_of,
    is_share,
    noise_text,
    ops_text,
    policies_of,
    rate_text,
    saves_bytes,
    score_text,
    sentences,
    shown,
    split_text,
    threads_text,
    throughput_of,
)
from saccade.serving.bench.picture import frontier_png
from saccade.serving.bench.report_page import whole_page
from saccade.serving.bench.report_tables import tables

SCHEMA = "saccade.report"
VERSION = 2
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NEAR = 0.03  # small loss: absolute for shares, else relative to the largest variant's score


def render(report: dict[str, Any]) -> Any:
    """Return the tables for a terminal, as one rich renderable."""
    from rich.console import Group
    from rich.text import Text

    parts = [part for table in tables(report) for part in (table.to_text(), "")]
    return Group(*parts, *map(Text, sentences(report)), Text(summary(report)))


def summary(report: dict[str, Any]) -> str:
    """Describe what was measured on which machine, and whether the machine was busy."""
    machine, data = report["machine"], report["data"]
    served = f"; server: {report['server']}" if report["server"] else "; without a server"
    ops = f", {text}" if (text := ops_text(report)) else ""
    threads = threads_text(one["in_process"].get("threads", 1) for one in report["variants"])
    return (
        f"{report['model']} on {split_text(data)} of {data['name']} ({data['n']} samples). "
        f"{machine['runtime']}, {threads}{ops}, on {machine['device']}{served}. {report['date']}."
        f" {noise_text(report)}".rstrip()
    )


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, frontier.png and report.html into an existing folder."""
    compact = json.dumps(report, sort_keys=True, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / "report.json", (compact + "\n").encode())
    draw(report, folder)


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write frontier.png and report.html. The page needs no other file."""
    picture = frontier_png(report)
    whole = page(report, picture).encode()
    write_atomically(folder / "frontier.png", picture)
    write_atomically(folder / "report.html", whole)


def page(report: dict[str, Any], picture: bytes) -> str:
    """Return the report as one self-contained HTML page.

    Raises: MissingPackage without plotly or jinja2.
    """
    return whole_page(
        report,
        picture,
        title=f"{report['model']} on {report['data']['name']}",
        headline=headline(report),
        summary=summary(report),
        alternative=_alternative(report),
    )


def headline(report: dict[str, Any]) -> str:
    """Compare the cheapest variant that loses little with the largest, in a sentence."""
    variants = report["variants"]
    kept = [variant for variant in variants if variant["dominated_by"] is None]
    what = "bytes of an embedding" if saves_bytes(variants[0]) else "throughput"
    are = f"variant{'s' * (len(variants) != 1)} {'is' if len(kept) == 1 else 'are'}"
    standing = f"{len(kept)} of {len(variants)} {are} on the frontier of score and {what}."
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
        return f"{standing} No other variant on it scores within {most}." if others else standing
    if saves_bytes(full):
        small = min(near, key=cost_of)
        gain = f"an embedding {cost_of(full) / cost_of(small):.1f} times smaller than that"
        where = ""
    else:
        small = max(near, key=cost_of)
        where = f" ({throughput_of(small)[1]})"
        gain = f"{cost_of(small) / cost_of(full):.1f} times the throughput"
    apart = _difference(score, lost(small))
    told = f"with a score {apart} {'lower' if sign * lost(small) >= 0 else 'higher'}"
    if apart == _difference(score, 0):
        told = "with the same score"
    return (
        f"{standing} {small['variant']} keeps {small['kept']} of {small['total']} "
        f"{small['unit']}: {gain} of {full['variant']}{where}, {told}."
    )


def _difference(score: dict[str, Any], value: float) -> str:
    """Return a difference between two values of a score as text."""
    apart = abs(shown(score, value))
    return f"{apart:.1f} points" if is_share(score) else f"{apart:.3f}"


def _alternative(report: dict[str, Any]) -> str:
    def words(variant: dict[str, Any]) -> str:
        place = (
            f"{variant['embedding_bytes']:,} bytes per embedding"
            if saves_bytes(variant)
            else f"{rate_text(throughput_of(variant)[0])} per second"
        )
        return f"{variant['variant']} {score_text(variant['score'])} at {place}" + (
            " (dominated)" if variant["dominated_by"] else ""
        )

    policies = [f"policy {one['policy']} {score_text(one['score'])}" for one in policies_of(report)]
    variants = [words(variant) for variant in report["variants"]]
    return "Score against cost: " + "; ".join(variants + policies)


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.json that `write_report` wrote.

    Raises: SaccadeError for a missing or foreign file, or an unknown version.
    """
    report = read_json(path, "saccade bench")
    if (version := (report.get("schema"), report.get("version"))) != (SCHEMA, VERSION):
        why = f"has schema and version {version}, expected {(SCHEMA, VERSION)}"
        raise Damaged(path, why, "saccade bench")
    return report


def draw_again(path: Path) -> None:
    """Draw the image and the page again, next to a report.json and from it alone.

    Raises: SaccadeError if `read_report` refuses the file, or the report is incomplete.
    """
    report = read_report(path)
    incomplete: type[Exception] = require("jinja2", extra="bench").UndefinedError
    try:
        draw(report, path.parent)
    except (*_DAMAGE, incomplete) as error:
        raise Damaged(path, f"incomplete or edited ({error!r:.100})", "saccade bench") from error


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            draw_again(Path(name))
    except SaccadeError as error:
        sys.exit(str(error))
