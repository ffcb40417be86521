# SPDX-License-Identifier: Apache-2.0
"""What a sweep's report says beyond a benchmark's: four frontiers, engines, and what failed."""

from collections.abc import Sequence
from typing import Any

from saccade.serving.figures import heading, score_text
from saccade.serving.report_table import Table

# By name of a cost: its heading, what it is divided by, and how it is written.
_COSTS = {
    "throughput": ("per second", 1.0, ",.0f"),
    "latency": ("p95 ms", 1.0, ".2f"),
    "memory": ("memory MiB", 2.0**20, ".1f"),
    "embedding bytes": ("bytes", 1.0, ",.0f"),
}


def swept_tables(report: dict[str, Any]) -> list[Table]:
    """The tables of a sweep, in the order in which they are read; none of a benchmark."""
    found = []
    if any("costs" in variant for variant in report["variants"]):
        found.append(_frontiers(report["variants"]))
    if report.get("failed"):
        found.append(_failed(report["failed"]))
    if report.get("engines"):
        found.append(_engines(report["engines"]))
    return found


def _frontiers(variants: Sequence[dict[str, Any]]) -> Table:
    names = [name for name in _COSTS if all(name in variant["costs"] for variant in variants)]
    rows = []
    for variant in variants:
        costs = variant["costs"]
        standing = [name for name in names if costs[name].get("dominated_by") is None]
        cells = [_spread(costs[name], *_COSTS[name][1:]) for name in names]
        all_of_them = "all" if len(standing) == len(names) else ", ".join(standing)
        rows.append(
            (variant["variant"], score_text(variant["score"]), *cells, all_of_them or "none")
        )
    columns = (
        "variant", heading(variants[0]["score"]).removesuffix(" %"),
        *(_COSTS[name][0] for name in names), "on the frontier of",
    )  # fmt: skip
    first = variants[0]["costs"]
    note = (
        "In brackets the least and the most of single rounds. "
        + "; ".join(f"{name}: {first[name]['of']}" for name in names)
        + ". On a frontier: no variant costs as little and scores better beyond the paired 95 % "
        "interval of the difference."
    )
    return Table("Frontiers", columns, tuple(rows), note)


def _failed(failed: Sequence[dict[str, Any]]) -> Table:
    rows = tuple((each["variant"], each["stage"], each["reason"]) for each in failed)
    return Table("Failed", ("variant", "stage", "reason"), rows)


def _engines(engines: Sequence[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            each["name"],
            each["engine"],
            "+".join(each["compute_capabilities"]),
            f"{each['bytes'] / 2**20:.2f}",
            f"{each['build_seconds']:.1f}",
        )
        for each in engines
    )
    columns = ("plan", "engine", "compute capability", "MiB", "build seconds")
    return Table("Engines", columns, rows, "Built, not run: an engine needs a GPU.")


def _spread(cost: dict[str, Any], divisor: float, form: str) -> str:
    value, least, most = (cost[key] / divisor for key in ("value", "least", "most"))
    if least == most:
        return f"{value:{form}}"
    return f"{value:{form}} ({least:{form}}-{most:{form}})"
