# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures as tables, a picture and a page, all made from one JSON object.

`python -m saccade.serving.report build/report/report.json` draws picture and page again.
"""

import base64
import html
import json
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from saccade.plugins.errors import SaccadeError
from saccade.plugins.files import write_atomically
from saccade.serving.picture import frontier_png, throughput_of

SCHEMA = "saccade.report"
VERSION = 1
_NEAR_POINTS = 3.0  # of score: what the headline counts as little


@dataclass(frozen=True)
class Table:
    """Headings and cells as text; the first column names the variant."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(report: dict[str, Any]) -> list[Table]:
    """The report's tables, in the order in which they are read."""
    variants = report["variants"]
    found = [_score(variants), _throughput(variants)]
    if variants[0]["grpc"]:
        found.append(_latency(variants))
    found.append(_cost(variants))
    return found


def render(report: dict[str, Any]) -> Any:
    """The tables for a terminal, as one rich renderable."""
    import rich.box
    import rich.table
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for each in tables(report):
        shown = rich.table.Table(
            title=each.title, caption=each.note or None, box=rich.box.SIMPLE_HEAD, pad_edge=False,
            collapse_padding=True,
            title_justify="left", caption_justify="left", title_style="bold", header_style="",
        )  # fmt: skip
        for index, column in enumerate(each.columns):
            words = index == 0 or column == _DOMINATED
            shown.add_column(column, justify="left" if words else "right", no_wrap=index == 0)
        for row in each.rows:
            shown.add_row(*row)
        parts += [shown, ""]
    return Group(*parts, Text(summary(report)))


def summary(report: dict[str, Any]) -> str:
    """Where and on what the figures were taken, in one sentence each."""
    machine, data = report["machine"], report["data"]
    served = f"; server: {report['server']}" if report["server"] else "; without a server"
    return (
        f"{report['model']} on the test split of {data['name']} ({data['n']} images). "
        f"{machine['runtime']}, one thread, on {machine['device']}{served}. {report['date']}."
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


def page(report: dict[str, Any], picture: bytes) -> str:
    """The report as one HTML page with the picture inside it."""
    template = string.Template(
        resources.files("saccade.serving").joinpath("report.html").read_text("utf-8")
    )
    return template.substitute(
        title=html.escape(f"{report['model']} on {report['data']['name']}"),
        summary=html.escape(summary(report)),
        headline=html.escape(headline(report)),
        picture=base64.b64encode(picture).decode(),
        alt=html.escape(_alternative(report)),
        tables="\n".join(_html_table(each) for each in tables(report)),
        machine=html.escape(json.dumps(report["machine"], indent=1, sort_keys=True)),
    )


def headline(report: dict[str, Any]) -> str:
    """The fastest variant that gives up little, against the largest."""
    variants = report["variants"]
    kept = [variant for variant in variants if variant["dominated_by"] is None]
    count = f"{len(kept)} of {len(variants)} variants are on the frontier."
    full = variants[0]

    def lost(variant: dict[str, Any]) -> float:
        return 100 * float(full["score"]["value"] - variant["score"]["value"])

    near = [variant for variant in kept if lost(variant) <= _NEAR_POINTS and variant is not full]
    if not near:
        return count
    small = max(near, key=lambda variant: throughput_of(variant)[0])
    change = f"{abs(lost(small)):.1f} points {'lower' if lost(small) >= 0 else 'higher'}"
    return (
        f"{count} {small['variant']} keeps {small['kept']} of {small['total']} "
        f"{small['unit']}: {throughput_of(small)[0] / throughput_of(full)[0]:.1f} times the "
        f"throughput of {full['variant']}, score {change}."
    )


def _score(variants: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for variant in variants:
        low, high = variant["score"]["interval"]
        rows.append(
            (
                variant["variant"],
                f"{variant['kept']}/{variant['total']}",
                f"{100 * variant['score']['value']:.2f}",
                f"{100 * low:.1f}-{100 * high:.1f}",
                "-" if variant["top5"] is None else f"{100 * variant['top5']:.2f}",
                variant["dominated_by"] or "",
            )
        )
    columns = ("variant", variants[0]["unit"], "top-1 %", "95 %", "top-5 %", _DOMINATED)
    return Table("Score", columns, tuple(rows))


def _throughput(variants: Sequence[dict[str, Any]]) -> Table:
    points = _points(variants, "concurrency_")
    rows = tuple(
        (
            variant["variant"],
            *(_count(variant["in_process"][name]["inferences_per_second"]) for name in _BATCHES),
            f"{_count(_best(variant)['inferences_per_second'])} at {_best_batch(variant)}",
            *(_count(variant["grpc"][point]["inferences_per_second"]) for point in points),
        )
        for variant in variants
    )
    served = (f"gRPC x{point.rpartition('_')[2]}" for point in points)
    note = "Batches: in process, one thread."
    if points:
        note += " gRPC xN: N clients, one image a request."
    columns = ("variant", "batch 1", "batch 64", "best batch", *served)
    return Table("Inferences per second", columns, rows, note)


def _latency(variants: Sequence[dict[str, Any]]) -> Table:
    points = [*_points(variants, "concurrency_"), *_points(variants, "router_concurrency_")]
    columns = ["variant"]
    for point in points:
        clients = point.rpartition("_")[2]
        columns.append(f"router x{clients}" if point.startswith("router") else f"gRPC x{clients}")
    rows = [
        (variant["variant"], *(_quantiles(variant["grpc"].get(point)) for point in points))
        for variant in variants
    ]
    shares = [
        100 * point["client_cpu_share"]
        for variant in variants
        for point in variant["grpc"].values()
    ]
    note = (
        "p50/p95/p99 of a request. gRPC: raw tensor to the variant; router: PNG to the router. "
        f"The load generator used {min(shares):.0f} to {max(shares):.0f} % of all processor time."
    )
    return Table("Latency in milliseconds", tuple(columns), tuple(rows), note)


def _cost(variants: Sequence[dict[str, Any]]) -> Table:
    columns = (
        "variant", "file MiB", "parameters", "multiply-adds", "peak MiB", "SHA-256",
    )  # fmt: skip
    rows = tuple(
        (
            variant["variant"],
            f"{variant['file_bytes'] / 2**20:.2f}",
            f"{variant['parameters']:,}",
            f"{variant['multiply_adds']:,}",
            f"{variant['peak_activation_bytes'] / 2**20:.3f}",
            variant["sha256"][:12],
        )
        for variant in variants
    )
    note = "Peak: the most that the activations of one image occupy at once."
    return Table("Cost of one image", columns, rows, note)


_DOMINATED = "dominated by"
_BATCHES = ("batch_1", "batch_64")


def _best_batch(variant: dict[str, Any]) -> int:
    return int(variant["in_process"]["best_batch"])


def _best(variant: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = variant["in_process"][f"batch_{_best_batch(variant)}"]
    return found


def _points(variants: Sequence[dict[str, Any]], prefix: str) -> list[str]:
    names = {name for each in variants for name in each["grpc"] or {} if name.startswith(prefix)}
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _quantiles(point: dict[str, Any] | None) -> str:
    if point is None:
        return "-"
    values = (point[name] for name in ("p50_ms", "p95_ms", "p99_ms"))
    return "/".join(f"{value:.{2 - (value >= 10) - (value >= 100)}f}" for value in values)


def _alternative(report: dict[str, Any]) -> str:
    def words(each: dict[str, Any]) -> str:
        speed, score = _count(throughput_of(each)[0]), 100 * each["score"]["value"]
        return f"{each['variant']} {score:.2f} % at {speed} per second" + (
            " (dominated)" if each["dominated_by"] else ""
        )

    return "Score against throughput: " + "; ".join(words(each) for each in report["variants"])


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in table.columns)
    body = "\n".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f'<section><h2>{html.escape(table.title)}</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>"
    )


def read_report(path: Path) -> dict[str, Any]:
    """A report.json as written by `write_report`.

    Raises: SaccadeError for a missing or foreign file, and for an unknown version.
    """
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: cannot be read ({error}). Write it with: saccade bench"
        ) from error
    found = (report.get("schema"), report.get("version")) if isinstance(report, dict) else None
    if found != (SCHEMA, VERSION):
        raise SaccadeError(
            f"{path}: is {found}, expected {(SCHEMA, VERSION)}. Write it with: saccade bench"
        )
    return dict(report)


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            draw(read_report(Path(name)), Path(name).parent)
    except SaccadeError as error:
        sys.exit(str(error))
