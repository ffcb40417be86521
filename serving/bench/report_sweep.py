# SPDX-License-Identifier: Apache-2.0
"""What a sweep's report says beyond a benchmark's: four frontiers, engines, and what failed."""

from collections.abc import Sequence
from typing import Any

from saccade.serving.bench.figures import heading, saves_bytes, score_text
from saccade.serving.bench.report_table import Table

_BYTES = "embedding bytes"
# By name of a cost: its heading, what it is divided by, and how it is written.
_COSTS = {
    "throughput": ("per second", 1.0, ",.0f"),
    "latency": ("p95 ms", 1.0, ".2f"),
    "memory": ("MiB", 2.0**20, ".1f"),
    _BYTES: ("bytes", 1.0, ",.0f"),
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
    names = _told_apart(variants)
    rows = []
    for variant in variants:
        costs = variant["costs"]
        cells = [_spread(costs[name], *_COSTS[name][1:]) for name in names]
        rows.append(
            (variant["variant"], score_text(variant["score"]), *cells, _standing(costs, names))
        )
    columns = (
        "variant", heading(variants[0]["score"]).removesuffix(" %"),
        *(_COSTS[name][0] for name in names), "on the frontier of",
    )  # fmt: skip
    of = [f"{name} ({_COSTS[name][0]}): {variants[0]['costs'][name]['of']}" for name in names]
    note = (
        "On the frontier of a cost: no variant that costs no more scores better beyond the paired "
        "95 % interval of the difference. In brackets the least and the most of single rounds. "
        f"Costs: {'; '.join(of)}."
    )
    return Table("Frontiers", columns, tuple(rows), note)


def _standing(costs: dict[str, Any], names: Sequence[str]) -> str:
    """Whose frontiers it is on."""
    off = [name for name in names if costs[name].get("dominated_by") is not None]
    if len(off) == len(names):
        return "none"
    if len(off) > 1:
        return ", ".join(name for name in names if name not in off)
    return " ".join(["all", *(f"but {name}" for name in off)])


def _told_apart(variants: Sequence[dict[str, Any]]) -> list[str]:
    """The costs that all have, first the one that the budget saves, but no size that all share."""
    names = [name for name in _COSTS if all(name in variant["costs"] for variant in variants)]
    if _BYTES in names and len({variant["costs"][_BYTES]["value"] for variant in variants}) == 1:
        names.remove(_BYTES)
    return sorted(names, key=lambda name: name != _BYTES) if saves_bytes(variants[0]) else names


def _failed(failed: Sequence[dict[str, Any]]) -> Table:
    rows = tuple((each["variant"], each["stage"], each["reason"]) for each in failed)
    note = (
        "Tried again with --retry. The gate's limits are options of `saccade export`; what that "
        "writes is measured by `saccade bench`."
    )
    return Table("Failed", ("variant", "stage", "reason"), rows, note)


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
