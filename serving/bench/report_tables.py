# SPDX-License-Identifier: Apache-2.0
"""Tables of a benchmark's report: headings and cells as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.exporter.artefact.frontier import BY_THREADS
from saccade.serving.bench.figures import (
    bare_text,
    has_rounds,
    heading,
    interval_text,
    ops_text,
    points,
    saves_bytes,
    score_text,
    threads_text,
    works,
)
from saccade.serving.bench.report_policies import policies_of, policy_rows, step_rows


@dataclass(frozen=True)
class ReportTable:
    """Headings and cells as text; the first column names the variant."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


_DOMINATED = "dominated by"
# Columns of words.
WORDS = (_DOMINATED, "score", "on the frontier of", "stage", "reason", "by")
_BATCHES = ("batch_1", "batch_64")


def tables(report: dict[str, Any]) -> list[ReportTable]:
    """Return the report's tables in reading order."""
    variants = report["variants"]
    tables = [_score(variants)]
    if variants[0]["scores"]:
        tables.append(_further(variants))
    if policies_of(report):
        tables += _policies(report)
    tables.append(_throughput(variants, ops_text(report)))
    if variants[0]["grpc"]:
        tables.append(_latency(variants))
    tables.append(_cost(variants))
    return [*swept_tables(report), *tables]


def _score(variants: Sequence[dict[str, Any]]) -> ReportTable:
    first = variants[0]
    top5 = any(variant["top5"] is not None for variant in variants)
    columns = [
        "variant", first["unit"], *["bytes"] * saves_bytes(first), heading(first["score"]), "95 %",
        *["top-5 %"] * top5, _DOMINATED,
    ]  # fmt: skip
    rows = []
    for variant in variants:
        row = [variant["variant"], f"{variant['kept']}/{variant['total']}"]
        if saves_bytes(first):
            row.append(f"{variant['embedding_bytes']:,}")
        row += [bare_text(variant["score"]), interval_text(variant["score"])]
        if top5:
            row.append("-" if variant["top5"] is None else f"{100 * variant['top5']:.2f}")
        rows.append((*row, variant["dominated_by"] or ""))
    note = "Bytes: size of one embedding, which the budget reduces." if saves_bytes(first) else ""
    return ReportTable("Score", tuple(columns), tuple(rows), note)


def _further(variants: Sequence[dict[str, Any]]) -> ReportTable:
    rows = [
        (
            variant["variant"],
            score["name"],
            score_text(score),
            interval_text(score),
            str(score["n"]),
        )
        for variant in variants
        for score in variant["scores"]
    ]
    return ReportTable("Further scores", ("variant", "score", "value", "95 %", "n"), tuple(rows))


def _policies(report: dict[str, Any]) -> list[ReportTable]:
    note = (
        "Chains of variants. Same: answers equal to the full model's; risk: the certified limit "
        "of lost answers. Per second: in process, at the best batch; x full: times the full "
        "model's, with the paired 95 % interval over the rounds."
    )
    if any(policy["times_full_served"] for policy in policies_of(report)):
        note += " x served: times the full model's through the router, with the most clients."
    return [
        ReportTable("Policies", *policy_rows(report), note),
        ReportTable("Steps of the policies", *step_rows(report)),
    ]


def _throughput(variants: Sequence[dict[str, Any]], ops: str) -> ReportTable:
    served = _served_points(variants)
    rows = tuple(
        (
            title,
            *(_rate(inside.get(name)) for name in _BATCHES),
            _best(inside),
            *(_rate(grpc.get(point)) for point in served if grpc is not None),
        )
        for variant in variants
        for title, inside, grpc in works(variant)
    )
    columns = ("variant", "batch 1", "batch 64", "best batch", *map(_clients, served))
    threads = threads_text(one["in_process"].get("threads", 1) for one in variants)
    note = f"Batches: in process, {threads}{f', {ops}' if ops else ''}."
    if by_threads := _by_threads(variants):
        note += f" {by_threads}"
    if served:
        kind = "router" if served[0].startswith("router") else "gRPC"
        note += f" {kind} xN: N clients, one sample per request."
    return ReportTable("Inferences per second", columns, rows, note)


def _by_threads(variants: Sequence[dict[str, Any]]) -> str:
    """Return what further threads gain in batches of eight; nothing if only one was measured."""
    every = [rates for one in variants if len(rates := one["in_process"].get(BY_THREADS, {})) > 1]
    if not every:
        return ""
    gains = [
        {count: rate / rates["1"] for count, rate in rates.items() if count != "1"}
        for rates in every
    ]
    text = ", ".join(
        f"{count} threads {_span([own[count] for own in gains if count in own])}"
        for count in sorted(gains[0], key=int)
    )
    return f"Times the speed of one thread: {text}."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _latency(variants: Sequence[dict[str, Any]]) -> ReportTable:
    every = [
        (title, grpc)
        for variant in variants
        for title, _, grpc in works(variant)
        if grpc is not None
    ]
    names = _all_points(variants, "concurrency_") + _all_points(variants, "router_concurrency_")
    rows = [(title, *(_quantiles(grpc.get(name)) for name in names)) for title, grpc in every]
    shares = [
        100 * grpc[name]["client_cpu_share"] for _, grpc in every for name in names if name in grpc
    ]
    note = (
        "p50/p95/p99 of a request's time. gRPC: raw tensors to the variant; router: images as PNG. "
        f"The load generator used {min(shares):.0f} to {max(shares):.0f} % of all CPU time."
    )
    columns = ("variant", *map(_clients, names))
    return ReportTable("Latency in milliseconds", columns, tuple(rows), note)


def _cost(variants: Sequence[dict[str, Any]]) -> ReportTable:
    columns = ("file", "MiB", "parameters", "multiply-adds", "peak MiB", "SHA-256")
    rows = tuple(
        (
            file["name"],
            f"{file['file_bytes'] / 2**20:.2f}",
            f"{file['parameters']:,}",
            f"{file['multiply_adds']:,}",
            f"{file['peak_activation_bytes'] / 2**20:.3f}",
            file["sha256"][:8],
        )
        for variant in variants
        for file in variant["files"]
    )
    note = "Peak: the most memory that the activations of one sample occupy at any time."
    return ReportTable("Cost of one sample", columns, rows, note)


def _served_points(variants: Sequence[dict[str, Any]]) -> list[str]:
    """Return the points measured through a server: at the variants, else at the router."""
    return _all_points(variants, "concurrency_") or _all_points(variants, "router_concurrency_")


def _all_points(variants: Sequence[dict[str, Any]], prefix: str) -> list[str]:
    return points({name: None for variant in variants for name in variant["grpc"] or {}}, prefix)


def _clients(point: str) -> str:
    clients = point.rpartition("_")[2]
    return f"router x{clients}" if point.startswith("router") else f"gRPC x{clients}"


def count(value: float) -> str:
    """Return a rate as text, with no more digits than were measured."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _best(inside: dict[str, Any]) -> str:
    size = inside["best_batch"]
    return f"{_rate(inside[f'batch_{size}'])} at {size}"


def _rate(point: dict[str, Any] | None) -> str:
    return "-" if point is None else count(point["inferences_per_second"])


def _quantiles(point: dict[str, Any] | None) -> str:
    if point is None:
        return "-"
    values = (point[name] for name in ("p50_ms", "p95_ms", "p99_ms"))
    return "/".join(f"{value:.{2 - (value >= 10) - (value >= 100)}f}" for value in values)


_BYTES = "embedding bytes"
# Name of a cost -> heading, divisor and format.
_COSTS = {
    "throughput": ("per second", 1.0, ",.0f"),
    "latency": ("p95 ms", 1.0, ".2f"),
    "memory": ("MiB", 2.0**20, ".1f"),
    _BYTES: ("bytes", 1.0, ",.0f"),
}


def swept_tables(report: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of a sweep in reading order; a benchmark has none."""
    tables = []
    if any("costs" in variant for variant in report["variants"]):
        tables.append(_frontiers(report["variants"]))
    if report.get("failed"):
        tables.append(_failed(report["failed"]))
    if report.get("engines"):
        tables.append(_engines(report["engines"]))
    return tables


def _frontiers(variants: Sequence[dict[str, Any]]) -> ReportTable:
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
    sure = has_rounds(variants)
    by_rounds = "Surely: by the paired 95 % interval over the rounds. " if sure else ""
    note = (
        f"A variant is on the frontier of a cost unless another one {'surely ' * sure}costs no "
        "more and scores better, beyond the paired 95 % interval of the difference. "
        f"{by_rounds}In parentheses: the lowest and highest value of single rounds. "
        f"Costs: {'; '.join(of)}."
    )
    return ReportTable("Frontiers", columns, tuple(rows), note)


def _standing(costs: dict[str, Any], names: Sequence[str]) -> str:
    """Return the names of the frontiers that the variant is on, as text."""
    off = [name for name in names if costs[name].get("dominated_by") is not None]
    if len(off) == len(names):
        return "none"
    if len(off) > 1:
        return ", ".join(name for name in names if name not in off)
    return " ".join(["all", *(f"but {name}" for name in off)])


def _told_apart(variants: Sequence[dict[str, Any]]) -> list[str]:
    """Return the costs that all variants have, without an embedding size that all share.

    The cost that the budget saves comes first.
    """
    names = [name for name in _COSTS if all(name in variant["costs"] for variant in variants)]
    if _BYTES in names and len({variant["costs"][_BYTES]["value"] for variant in variants}) == 1:
        names.remove(_BYTES)
    return sorted(names, key=lambda name: name != _BYTES) if saves_bytes(variants[0]) else names


def _failed(failed: Sequence[dict[str, Any]]) -> ReportTable:
    rows = tuple((failure["variant"], failure["stage"], failure["reason"]) for failure in failed)
    note = (
        "To try these points again, pass --retry. The gate's limits are options of `saccade "
        "export`; to measure what it writes, run `saccade bench`."
    )
    return ReportTable("Failed", ("variant", "stage", "reason"), rows, note)


def _engines(engines: Sequence[dict[str, Any]]) -> ReportTable:
    rows = tuple(
        (
            engine["name"],
            engine["engine"],
            "+".join(engine["compute_capabilities"]),
            f"{engine['bytes'] / 2**20:.2f}",
            f"{engine['build_seconds']:.1f}",
        )
        for engine in engines
    )
    columns = ("plan", "engine", "compute capability", "MiB", "build seconds")
    return ReportTable("Engines", columns, rows, "Built but not run: that needs a GPU.")


def _spread(cost: dict[str, Any], divisor: float, form: str) -> str:
    value, least, most = (cost[key] / divisor for key in ("value", "least", "most"))
    if least == most:
        return f"{value:{form}}"
    return f"{value:{form}} ({least:{form}}-{most:{form}})"
