# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark's report: headings and cells as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.exporter.artefact.frontier import BY_THREADS
from saccade.exporter.artefact.variant import OF_GROUPS
from saccade.serving.bench.figures import (
    Figures,
    bare_text,
    clients_of,
    has_rounds,
    heading,
    interval_text,
    points,
    policies_of,
    rate_text,
    saves_bytes,
    score_text,
    times_digits,
    words,
    works,
)

_DOMINATED = "dominated by"
# Columns of words.
WORDS = (_DOMINATED, "score", "on the frontier of", "stage", "reason", "by")
_BATCHES = (1, 64)
_BYTES = "embedding bytes"
# Name of a cost -> heading, divisor and format.
_COSTS = {
    "throughput": ("per second", 1.0, ",.0f"),
    "latency": ("p95 ms", 1.0, ".2f"),
    "memory": ("MiB", 2.0**20, ".1f"),
    _BYTES: ("bytes", 1.0, ",.0f"),
}


@dataclass(frozen=True)
class ReportTable:
    """Headings and cells as text; the first column names the variant."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def to_text(self) -> Any:
        """Return the table for a terminal, as a rich renderable."""
        import rich.box
        import rich.table

        table = rich.table.Table(
            title=self.title or None, caption=self.note or None, box=rich.box.SIMPLE_HEAD,
            pad_edge=False, collapse_padding=True, title_justify="left", caption_justify="left",
            title_style="bold", header_style="",
        )  # fmt: skip
        for index, column in enumerate(self.columns):
            justify: Any = "left" if index == 0 or column in WORDS else "right"
            table.add_column(column, justify=justify, no_wrap=index == 0, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table


def table_of(title: str, rows: Sequence[Mapping[str, str]], note: str = "") -> ReportTable:
    """Return a table of rows by heading, with the headings of the first one."""
    columns = tuple(rows[0])
    cells = (tuple(row.get(column, "-") for column in columns) for row in rows)
    return ReportTable(title, columns, tuple(cells), note)


def tables(report: Figures) -> list[ReportTable]:
    """Return the report's tables in reading order."""
    variants = report["variants"]
    tables = []
    if any("costs" in variant for variant in variants):
        tables.append(_frontiers(variants))
    if report.get("failed"):
        tables.append(_failed(report["failed"]))
    if report.get("engines"):
        tables.append(_engines(report["engines"]))
    tables.append(_score(variants))
    if variants[0]["scores"]:
        tables.append(_further(variants))
    if policies := policies_of(report):
        tables += [_policies(policies), _steps(policies)]
    tables.append(_throughput(report))
    if variants[0]["grpc"]:
        tables.append(_latency(variants))
    return [*tables, _cost(variants)]


def _budget(variant: Figures) -> dict[str, str]:
    if variant["unit"] == OF_GROUPS:
        return {"cost": f"{variant['budget']:.3g}"}
    return {variant["unit"]: f"{variant['kept']}/{variant['total']}"}


def _score(variants: Sequence[Figures]) -> ReportTable:
    first = variants[0]
    top5 = any(variant["top5"] is not None for variant in variants)
    rows = []
    for variant in variants:
        row = {
            "variant": variant["variant"],
            **_budget(variant),
        }
        if saves_bytes(first):
            row["bytes"] = f"{variant['embedding_bytes']:,}"
        row[heading(first["score"])] = bare_text(variant["score"])
        row["95 %"] = interval_text(variant["score"])
        if top5:
            row["top-5 %"] = "-" if variant["top5"] is None else f"{100 * variant['top5']:.2f}"
        rows.append({**row, _DOMINATED: variant["dominated_by"] or ""})
    note = "Bytes: size of one embedding, which the budget reduces." if saves_bytes(first) else ""
    return table_of("Score", rows, note)


def _further(variants: Sequence[Figures]) -> ReportTable:
    rows = [
        {
            "variant": variant["variant"],
            "score": score["name"],
            "value": score_text(score),
            "95 %": interval_text(score),
            "n": str(score["n"]),
        }
        for variant in variants
        for score in variant["scores"]
    ]
    return table_of("Further scores", rows)


def _policies(policies: Sequence[Figures]) -> ReportTable:
    served = any(policy["times_full_served"] for policy in policies)
    rows = []
    for policy in policies:
        times, inside = policy["times_full"], policy["in_process"]
        ends = map(times_digits, times["interval"] or ())
        row = {
            "policy": policy["policy"],
            heading(policies[0]["score"]): bare_text(policy["score"]),
            "95 %": interval_text(policy["score"]),
            "same %": f"{100 * policy['agreement']:.2f}",
            "risk %": f"{100 * policy['risk']:g}",
            "per second": _rate(inside, f"batch_{inside['best_batch']}"),
            "x full": times_digits(times["times"]),
            "x full 95 %": "-".join(ends) or "-",
        }
        if through := policy["times_full_served"]:
            row["x served"] = times_digits(through["times"])
        elif served:
            row["x served"] = "-"
        rows.append(row)
    return table_of("Policies", rows, words("policies_note", served))


def _steps(policies: Sequence[Figures]) -> ReportTable:
    rows = [
        {
            "policy": policy["policy"],
            "step": str(number),
            "by": str(step["variant"]),
            "ends here %": f"{100 * step['share']:.1f}",
            "if confidence reaches": (
                "always" if step["threshold"] is None else f"{step['threshold']:.4f}"
            ),
        }
        for policy in policies
        for number, step in enumerate(policy["steps"], 1)
    ]
    return table_of("Steps of the policies", rows)


def _throughput(report: Figures) -> ReportTable:
    variants = report["variants"]
    # At the variants, else at the router.
    served = _all_points(variants, "concurrency_") or _all_points(variants, "router_concurrency_")
    rows = []
    for variant in variants:
        for title, inside, grpc in works(variant):
            best = inside["best_batch"]
            rows.append(
                {
                    "variant": title,
                    **{f"batch {size}": _rate(inside, f"batch_{size}") for size in _BATCHES},
                    "best batch": f"{_rate(inside, f'batch_{best}')} at {best}",
                    **{_clients(point): _rate(grpc or {}, point) for point in served},
                }
            )
    note = words("throughput_note", report, _gains(variants), served[:1])
    return table_of("Inferences per second", rows, note)


def _gains(variants: Sequence[Figures]) -> dict[str, list[str]]:
    """Return how many times faster further threads are: the least and the most, by their number."""
    every = [rates for one in variants if len(rates := one["in_process"].get(BY_THREADS, {})) > 1]
    gains = {
        count: sorted(rates[count] / rates["1"] for rates in every if count in rates)
        for count in sorted(every[0] if every else (), key=int)
        if count != "1"
    }
    return {count: [f"{of[0]:.2g}", f"{of[-1]:.2g}"] for count, of in gains.items()}


def _latency(variants: Sequence[Figures]) -> ReportTable:
    every = [
        (title, grpc)
        for variant in variants
        for title, _, grpc in works(variant)
        if grpc is not None
    ]
    names = _all_points(variants, "concurrency_") + _all_points(variants, "router_concurrency_")
    rows = [
        {"variant": title, **{_clients(name): _quantiles(grpc.get(name)) for name in names}}
        for title, grpc in every
    ]
    shares = [
        100 * grpc[name]["client_cpu_share"] for _, grpc in every for name in names if name in grpc
    ]
    note = words("latency_note", min(shares), max(shares))
    return table_of("Latency in milliseconds", rows, note)


def _cost(variants: Sequence[Figures]) -> ReportTable:
    rows = [
        {
            "file": file["name"],
            "MiB": f"{file['file_bytes'] / 2**20:.2f}",
            "parameters": f"{file['parameters']:,}",
            "multiply-adds": f"{file['multiply_adds']:,}",
            "peak MiB": f"{file['peak_activation_bytes'] / 2**20:.3f}",
            "SHA-256": file["sha256"][:8],
        }
        for variant in variants
        for file in variant["files"]
    ]
    note = "Peak: the most memory that the activations of one sample occupy at any time."
    return table_of("Cost of one sample", rows, note)


def _all_points(variants: Sequence[Figures], prefix: str) -> list[str]:
    return points({name for variant in variants for name in variant["grpc"] or {}}, prefix)


def _clients(point: str) -> str:
    kind = "router" if point.startswith("router") else "gRPC"
    return f"{kind} x{clients_of(point)}"


def _rate(figures: Figures, point: str) -> str:
    return rate_text(figures[point]["inferences_per_second"]) if point in figures else "-"


def _quantiles(point: Figures | None) -> str:
    if point is None:
        return "-"
    values = (point[name] for name in ("p50_ms", "p95_ms", "p99_ms"))
    return "/".join(f"{value:.{2 - (value >= 10) - (value >= 100)}f}" for value in values)


def _frontiers(variants: Sequence[Figures]) -> ReportTable:
    names = _told_apart(variants)
    score = heading(variants[0]["score"]).removesuffix(" %")
    rows = [
        {
            "variant": variant["variant"],
            score: score_text(variant["score"]),
            **{_COSTS[name][0]: _spread(name, variant["costs"][name]) for name in names},
            "on the frontier of": _standing(variant["costs"], names),
        }
        for variant in variants
    ]
    of = [f"{name} ({_COSTS[name][0]}): {variants[0]['costs'][name]['of']}" for name in names]
    return table_of("Frontiers", rows, words("frontiers_note", has_rounds(variants), of))


def _standing(costs: Figures, names: Sequence[str]) -> str:
    """Return the names of the frontiers that the variant is on, as text."""
    off = [name for name in names if costs[name].get("dominated_by") is not None]
    if len(off) == len(names):
        return "none"
    if len(off) > 1:
        return ", ".join(name for name in names if name not in off)
    return " ".join(["all", *(f"but {name}" for name in off)])


def _told_apart(variants: Sequence[Figures]) -> list[str]:
    """Return the costs that all variants have, without an embedding size that all share.

    The cost that the budget saves comes first.
    """
    names = [name for name in _COSTS if all(name in variant["costs"] for variant in variants)]
    if _BYTES in names and len({variant["costs"][_BYTES]["value"] for variant in variants}) == 1:
        names.remove(_BYTES)
    return sorted(names, key=lambda name: name != _BYTES) if saves_bytes(variants[0]) else names


def _spread(name: str, cost: Figures) -> str:
    _, divisor, form = _COSTS[name]
    value, least, most = (f"{cost[key] / divisor:{form}}" for key in ("value", "least", "most"))
    return value if cost["least"] == cost["most"] else f"{value} ({least}-{most})"


def _failed(failed: Sequence[Figures]) -> ReportTable:
    rows = [{name: failure[name] for name in ("variant", "stage", "reason")} for failure in failed]
    note = (
        "To try these points again, pass --retry. The gate's limits are options of `saccade "
        "export`; to measure what it writes, run `saccade bench`."
    )
    return table_of("Failed", rows, note)


def _engines(engines: Sequence[Figures]) -> ReportTable:
    rows = [
        {
            "plan": engine["name"],
            "engine": engine["engine"],
            "compute capability": "+".join(engine["compute_capabilities"]),
            "MiB": f"{engine['bytes'] / 2**20:.2f}",
            "build seconds": f"{engine['build_seconds']:.1f}",
        }
        for engine in engines
    ]
    return table_of("Engines", rows, "Built but not run: that needs a GPU.")
