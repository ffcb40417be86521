# SPDX-License-Identifier: Apache-2.0
"""Numbers for the charts of a report page, from the report's JSON object alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.serving.bench.figures import (
    heading,
    interval_text,
    points,
    saves_bytes,
    score_text,
    shown,
    throughput_of,
)
from saccade.serving.bench.report_policies import marks, policies_of

_PERCENTILES = (5, 25, 50, 75, 95, 99)
_LOG_FROM_RATIO = 4.0  # an axis is logarithmic from this ratio of largest to smallest value
# Parts of a request's time through the router, in the order in which they are drawn.
STAGES = (
    "model computes",
    "model waits for its turn",
    "copies to and from the model",
    "router accepts the request",
    "decode, wait in the router, answer, connection",
)
Variant = dict[str, Any]
Spread = tuple[float, float, float]  # value, least, most


@dataclass(frozen=True)
class Axis:
    """A cost to draw the frontier against."""

    name: str
    title: str  # on its button
    label: str  # on the chart
    unit: str
    more_is_better: bool
    bars: str  # meaning of the horizontal bars; empty: no bars
    cost: str  # name of the cost in a sweep, which marks dominated variants; empty: not in a sweep
    of: Callable[[Variant], Spread | None]
    of_policy: Callable[[Variant], Spread | None] = lambda _: None  # of a policy


def charts(report: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    variants = report["variants"]
    return {
        "score": heading(variants[0]["score"]),
        "higher_is_better": variants[0]["score"]["higher_is_better"],
        "variants": [_variant(report, variant) for variant in variants],
        "policies": marks(report),
        "axes": [_axis(axis, variants, policies_of(report)) for axis in axes(report)],
        "latency": latencies(variants),
        "stages": {"names": STAGES, "loads": stages(report)},
    }


def short_name(report: dict[str, Any], name: str) -> str:
    """Return a variant's name without the name of the model."""
    return name.removeprefix(f"{report['model']}-") or name


def _variant(report: dict[str, Any], variant: Variant) -> dict[str, Any]:
    score = variant["score"]
    low, high = (shown(score, bound) for bound in score["interval"])
    return {
        "name": variant["variant"],
        "short": short_name(report, variant["variant"]),
        "budget": f"{variant['budget']:g}",
        "precision": variant["precision"],
        "kept": f"{variant['kept']} of {variant['total']} {variant['unit']}",
        "score": shown(score, score["value"]),
        "low": low,
        "high": high,
        "score_text": score_text(score),
        "interval_text": interval_text(score),
    }


def axes(report: dict[str, Any]) -> list[Axis]:
    """Return the costs that all variants have and that differ between them, the main cost first.

    The main cost is the one in the image: bytes if the budget saves bytes, else throughput.
    """
    variants = report["variants"]
    _, where = throughput_of(variants[0])
    role = variants[0]["files"][0]["role"]
    component = f", component {role}" if role else ""
    rounds, half = "range of single rounds", "middle half of the calls"
    inside = Axis(
        "in-process", "Images/s, in process", "Images per second, in process, best batch",
        "images/s", True, half, "", _rate_inside, _rate_inside,
    )  # fmt: skip
    is_direct = where.startswith("through gRPC")
    known = [
        Axis(
            "bytes", "Embedding size", "Bytes per embedding",
            "bytes", False, "", "embedding bytes", _bytes,
        ),
        Axis(
            "throughput", f"Images/s, {_place(where)}", f"Images per second, {where}",
            "images/s", True, rounds, "throughput", _throughput,
            _nothing if is_direct else _throughput,
        ),
        inside,
        Axis(
            "router", "Images/s, router", "Images per second, through the router, most clients",
            "images/s", True, rounds, "", _routed, _routed,
        ),
        Axis(
            "latency", "p95 ms, server", "p95 latency in ms, through the server, one client",
            "ms", False, rounds, "latency", _latency, _latency,
        ),
        Axis(
            "call", "ms per image, in process", "Milliseconds per image, in process, batch 1",
            "ms", False, half, "", _call, _call,
        ),
        Axis(
            "macs", "Multiply-adds", f"Multiply-adds per image{component}",
            "MACs", False, "", "", _macs,
        ),
        Axis(
            "memory", "Memory", "Memory of a process, MiB",
            "MiB", False, rounds, "memory", _memory,
        ),
    ]  # fmt: skip
    policies = policies_of(report)
    if where.startswith("in process"):
        known.remove(inside)
    if not (is_direct and policies):
        known = [axis for axis in known if axis.name != "router"]
    if not saves_bytes(variants[0]):
        known.sort(key=lambda axis: axis.name == "bytes")
        # Policies are compared by costs that were measured of them, too.
        known.sort(key=lambda axis: not all(map(axis.of_policy, policies)))
    return [axis for axis in known if _tells_apart(axis, variants)]


def _nothing(policy: Variant) -> Spread | None:
    return None


def _place(where: str) -> str:
    return "in process" if where.startswith("in process") else "server"


def _tells_apart(axis: Axis, variants: Sequence[Variant]) -> bool:
    spreads = [axis.of(variant) for variant in variants]
    values = {spread[0] for spread in spreads if spread is not None and spread[0] > 0}
    is_alone = len(variants) == 1
    return None not in spreads and len(values) >= (1 if is_alone else 2)


def _axis(axis: Axis, variants: Sequence[Variant], policies: Sequence[Variant]) -> dict[str, Any]:
    spreads = [spread for variant in variants if (spread := axis.of(variant)) is not None]
    chains = [axis.of_policy(policy) for policy in policies]
    every = [*spreads, *(chain for chain in chains if chain is not None)]
    return {
        "name": axis.name,
        "title": axis.title,
        "label": axis.label,
        "unit": axis.unit,
        "more_is_better": axis.more_is_better,
        "bars": axis.bars if any(least < most for _, least, most in spreads) else "",
        "log": max(most for _, _, most in every)
        >= _LOG_FROM_RATIO * min(least for _, least, _ in every),
        "points": [_point(spread) for spread in spreads],
        "policies": [None if chain is None else _point(chain) for chain in chains],
        "dominated_by": [_dominated_by(axis, variant) for variant in variants],
        "judged": _is_judged(axis, variants[0]),
    }


def _point(spread: Spread) -> dict[str, float]:
    value, least, most = spread
    return {"value": value, "least": least, "most": most}


def _is_main(axis: Axis, variant: Variant) -> bool:
    return axis.name == ("bytes" if saves_bytes(variant) else "throughput")


def _is_judged(axis: Axis, variant: Variant) -> bool:
    """Return whether variants were compared by this cost, with the intervals of the scores."""
    return _is_main(axis, variant) or "dominated_by" in _swept(axis.cost, variant)


def _dominated_by(axis: Axis, variant: Variant) -> str | None:
    if _is_main(axis, variant):
        rival: str | None = variant["dominated_by"]
        return rival
    return _swept(axis.cost, variant).get("dominated_by")


def _swept(cost: str, variant: Variant) -> dict[str, Any]:
    content: dict[str, Any] = variant.get("costs", {}).get(cost, {})
    return content


def _spread_of(cost: dict[str, Any], divisor: float = 1.0) -> Spread | None:
    if not cost:
        return None
    value, least, most = (float(cost[key]) / divisor for key in ("value", "least", "most"))
    return value, least, most


def _bytes(variant: Variant) -> Spread | None:
    value = variant.get("embedding_bytes") or _swept("embedding bytes", variant).get("value")
    return None if value is None else (float(value),) * 3


def _throughput(variant: Variant) -> Spread | None:
    if cost := _spread_of(_swept("throughput", variant)):
        return cost
    rate = throughput_of(variant)[0]
    grpc = variant["grpc"] or {}
    for prefix in ("concurrency_", "router_concurrency_"):
        if names := points(grpc, prefix):
            point = grpc[names[-1]]
            ends = (point.get(f"inferences_per_second_{end}", rate) for end in ("min", "max"))
            least, most = ends
            return rate, least, most
    return _rate_inside(variant)


def _routed(variant: Variant) -> Spread | None:
    grpc = variant["grpc"] or {}
    names = points(grpc, "router_concurrency_")
    if not names:
        return None
    point = grpc[names[-1]]
    rate = point["inferences_per_second"]
    return (
        rate,
        point.get("inferences_per_second_min", rate),
        point.get("inferences_per_second_max", rate),
    )


def _rate_inside(variant: Variant) -> Spread | None:
    best = variant["in_process"]["best_batch"]
    value = variant["in_process"][f"batch_{best}"]["inferences_per_second"]
    quarters = _quarters(variant, best)
    if quarters is None:
        return value, value, value
    slow, fast = best / quarters[1], best / quarters[0]
    return value, min(value, slow), max(value, fast)


def _call(variant: Variant) -> Spread | None:
    point = variant["in_process"].get("batch_1")
    if point is None:
        return None
    quarters = _quarters(variant, 1)
    low, high = (1e3 * q for q in quarters) if quarters else (point["p50_ms"],) * 2
    return point["p50_ms"], min(low, point["p50_ms"]), max(high, point["p50_ms"])


def _quarters(variant: Variant, batch: int) -> tuple[float, float] | None:
    """Return the quartiles of the calls' times; None without raw samples. Units: seconds."""
    seconds = variant.get("samples", {}).get("in_process_s", {}).get(str(batch))
    if not seconds:
        return None
    low, high = np.percentile(seconds, (25, 75))
    return float(low), float(high)


def _latency(variant: Variant) -> Spread | None:
    if cost := _spread_of(_swept("latency", variant)):
        return cost
    grpc = variant["grpc"] or {}
    name = next((n for n in ("router_concurrency_1", "concurrency_1") if n in grpc), None)
    return None if name is None else (grpc[name]["p95_ms"],) * 3


def _macs(variant: Variant) -> Spread | None:
    # Only the component that takes the image: others answer separate requests, or run many times
    # per request.
    value = float(variant["files"][0]["multiply_adds"])
    return value, value, value


def _memory(variant: Variant) -> Spread | None:
    return _spread_of(_swept("memory", variant), 2.0**20)


def latencies(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return percentiles of a request's time by path and concurrency; empty without raw samples.

    Units: milliseconds.
    """
    paths = []
    for prefix, title in (
        ("router_concurrency_", "Through the router, images as PNG"),
        ("concurrency_", "Straight to the variant, raw tensors"),
    ):
        names = _measured(variants, prefix)
        if names:
            boxes = [
                [_percentiles(_raw_ms(variant, name)) for variant in variants] for name in names
            ]
            clients = [int(name.rpartition("_")[2]) for name in names]
            paths.append({"title": title, "clients": clients, "boxes": boxes})
    return paths


def _measured(variants: Sequence[Variant], prefix: str) -> list[str]:
    every = {name: None for variant in variants for name in _rounds(variant)}
    return points(every, prefix)


def _rounds(variant: Variant) -> Mapping[str, Any]:
    rounds: Mapping[str, Any] = variant.get("samples", {}).get("grpc", {})
    return rounds


def _raw_ms(variant: Variant, name: str) -> list[float]:
    return [ms for one in _rounds(variant).get(name, ()) for ms in one["latencies_ms"]]


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    quantiles = np.percentile(values, _PERCENTILES)
    found = {f"p{q}": round(float(v), 4) for q, v in zip(_PERCENTILES, quantiles, strict=True)}
    return {**found, "requests": len(values)}


def stages(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return where the time of a request through the router goes, by concurrency.

    The server's statistics cover the router and the variant that it calls. The rest of a caller's
    time is decoding, waiting in the router, sending the answer, and the connection.

    Units: milliseconds of a request, in the order of STAGES; empty without raw samples.
    """
    variants = report["variants"]
    loads = []
    for name in _measured(variants, "router_concurrency_"):
        rows = [_stages(report["model"], variant, name) for variant in variants]
        if any(rows):
            loads.append({"clients": int(name.rpartition("_")[2]), "rows": rows})
    return loads


def _stages(model: str, variant: Variant, name: str) -> list[float] | None:
    rounds = _rounds(variant).get(name, ())
    router = _account(rounds, model)
    accounts = [_account(rounds, file["name"]) for file in variant["files"]]
    called = [account for account in accounts if account]
    latencies_ms = _raw_ms(variant, name)
    # If a request makes many calls, it is unknown which of them waited for each other.
    if router is None or len(called) != 1 or not latencies_ms:
        return None
    (own,) = called
    parts = [
        own["compute_infer"],
        own["queue"],
        own["compute_input"] + own["compute_output"],
        sum(router.values()),
    ]
    rest = max(0.0, float(np.mean(latencies_ms)) - sum(parts))
    return [round(part, 4) for part in (*parts, rest)]


def _account(rounds: Sequence[Mapping[str, Any]], model: str) -> dict[str, float] | None:
    """Return the server's statistics of a model by part. Units: milliseconds per call."""
    accounts = [one["statistics"][model] for one in rounds if model in one.get("statistics", {})]
    requests = sum(account["requests"] for account in accounts)
    if not requests:
        return None
    return {
        part: 1e-6 * sum(account[f"{part}_ns"] for account in accounts) / requests
        for part in ("queue", "compute_input", "compute_infer", "compute_output")
    }
