# SPDX-License-Identifier: Apache-2.0
"""Numbers for the charts of a report, from the report's JSON object alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from saccade.serving.bench.figures import (
    clients_of,
    heading,
    interval_text,
    points,
    policies_of,
    saves_bytes,
    score_text,
    shown,
    throughput_of,
)

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
_PATHS = (
    ("router_concurrency_", "Through the router, images as PNG"),
    ("concurrency_", "Straight to the variant, raw tensors"),
)
_ROUNDS, _HALF = "range of single rounds", "middle half of the calls"  # horizontal bars
Variant = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """A cost, with the ends of its horizontal bar."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Axis:
    """A cost to draw the frontier against."""

    name: str
    title: str  # on its button
    label: str  # on the chart
    unit: str
    of: Callable[[Variant], Spread | None]
    bars: str = ""  # meaning of the horizontal bars; empty: no bars
    cost: str = ""  # name of the cost in a sweep, which marks dominated variants
    more_is_better: bool = False
    of_policies: bool = False  # whether it was measured of policies as well


def charts(report: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the page's script draws."""
    variants = report["variants"]
    return {
        "score": heading(variants[0]["score"]),
        "higher_is_better": variants[0]["score"]["higher_is_better"],
        "variants": variant_marks(report),
        "policies": policy_marks(report),
        "axes": [drawn_axis(axis, report) for axis in axes(report) if _tells_apart(axis, variants)],
        "latency": latencies(variants),
        "stages": {"names": STAGES, "loads": stages(report)},
    }


def short_name(report: dict[str, Any], name: str) -> str:
    """Return a variant's name without the name of the model."""
    return name.removeprefix(f"{report['model']}-") or name


def variant_marks(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variants as points of a chart: names, scores and texts."""
    return [
        {
            "name": variant["variant"],
            "short": short_name(report, variant["variant"]),
            "budget": f"{variant['budget']:g}",
            "precision": variant["precision"],
            "kept": f"{variant['kept']} of {variant['total']} {variant['unit']}",
            **_height(variant["score"]),
        }
        for variant in report["variants"]
    ]


def policy_marks(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the policies as points of a chart: names, scores and texts."""
    return [
        {
            "name": policy["policy"],
            "chain": " → ".join(
                f"{step['variant']} {100 * step['share']:.0f} %" for step in policy["steps"]
            ),
            "same": f"{100 * policy['agreement']:.2f} %",
            "risk": f"{100 * policy['risk']:g} %",
            **_height(policy["score"]),
        }
        for policy in policies_of(report)
    ]


def _height(score: dict[str, Any]) -> dict[str, Any]:
    low, high = (shown(score, bound) for bound in score["interval"])
    return {
        "score": shown(score, score["value"]),
        "low": low,
        "high": high,
        "score_text": score_text(score),
        "interval_text": interval_text(score),
    }


def axes(report: dict[str, Any]) -> list[Axis]:
    """Return the costs, the main cost first.

    The main cost is bytes if the budget saves bytes, else throughput. With policies, the costs that
    were measured of them come before the others.
    """
    variants = report["variants"]
    _, where = throughput_of(variants[0])
    role = variants[0]["files"][0]["role"]
    component = f", component {role}" if role else ""
    direct, inside = where.startswith("through gRPC"), where.startswith("in process")
    place, rate = ("in process", _inside) if inside else ("server", _throughput)
    known = [
        Axis("bytes", "Embedding size", "Bytes per embedding", "bytes", _bytes,
             cost="embedding bytes"),
        Axis("throughput", f"Images/s, {place}", f"Images per second, {where}", "images/s",
             rate, _ROUNDS, "throughput", more_is_better=True, of_policies=not direct),
        Axis("in-process", "Images/s, in process", "Images per second, in process, best batch",
             "images/s", _rate_inside, _HALF, more_is_better=True, of_policies=True),
        Axis("router", "Images/s, router", "Images per second, through the router, most clients",
             "images/s", _routed, _ROUNDS, more_is_better=True, of_policies=True),
        Axis("latency", "p95 ms, server", "p95 latency in ms, through the server, one client",
             "ms", _latency, _ROUNDS, "latency", of_policies=True),
        Axis("call", "ms per image, in process", "Milliseconds per image, in process, batch 1",
             "ms", _call, _HALF, of_policies=True),
        Axis("macs", "Multiply-adds", f"Multiply-adds per image{component}", "MACs", _macs),
        Axis("memory", "Memory", "Memory of a process, MiB", "MiB", _memory, _ROUNDS, "memory"),
    ]  # fmt: skip
    policies = policies_of(report)
    # Throughput is in process already, or through the router.
    repeated = {"in-process"} if inside else set()
    repeated |= set() if direct and policies else {"router"}
    known = [axis for axis in known if axis.name not in repeated]
    if not saves_bytes(variants[0]):
        known.sort(key=lambda axis: axis.name == "bytes")
        known.sort(key=lambda axis: any(_of_policy(axis, policy) is None for policy in policies))
    return known


def drawn_axis(axis: Axis, report: dict[str, Any]) -> dict[str, Any]:
    """Return an axis with the place of each variant and policy on it, as the page draws it."""
    variants, policies = report["variants"], policies_of(report)
    spreads = [spread for variant in variants if (spread := axis.of(variant)) is not None]
    chains = [_of_policy(axis, policy) for policy in policies]
    every = [*spreads, *(chain for chain in chains if chain is not None)]
    most, least = max(one.most for one in every), min(one.least for one in every)
    # Variants were compared by the main cost, and in a sweep by further ones.
    main = axis.name == ("bytes" if saves_bytes(variants[0]) else "throughput")
    judges = [variant if main else _swept(axis.cost, variant) for variant in variants]
    return {
        "name": axis.name,
        "title": axis.title,
        "label": axis.label,
        "unit": axis.unit,
        "more_is_better": axis.more_is_better,
        "bars": axis.bars if any(one.least < one.most for one in spreads) else "",
        "log": most >= _LOG_FROM_RATIO * least,
        "points": [asdict(one) for one in spreads],
        "policies": [chain and asdict(chain) for chain in chains],
        "dominated_by": [judge.get("dominated_by") for judge in judges],
        "judged": "dominated_by" in judges[0],
    }


def _of_policy(axis: Axis, policy: dict[str, Any]) -> Spread | None:
    return axis.of(policy) if axis.of_policies else None


def _tells_apart(axis: Axis, variants: Sequence[Variant]) -> bool:
    """Return whether all variants have this cost and differ in it."""
    spreads = [axis.of(variant) for variant in variants]
    values = {spread.value for spread in spreads if spread is not None and spread.value > 0}
    return None not in spreads and len(values) >= min(2, len(variants))


def _swept(cost: str, variant: Variant) -> dict[str, Any]:
    content: dict[str, Any] = variant.get("costs", {}).get(cost, {})
    return content


def _swept_spread(cost: str, variant: Variant, divisor: float = 1.0) -> Spread | None:
    if not (content := _swept(cost, variant)):
        return None
    return Spread(*(float(content[key]) / divisor for key in ("value", "least", "most")))


def _exact(value: float | None) -> Spread | None:
    return None if value is None else Spread(float(value), float(value), float(value))


def _bytes(variant: Variant) -> Spread | None:
    return _exact(variant.get("embedding_bytes")) or _swept_spread("embedding bytes", variant)


def _served_rate(variant: Variant, prefix: str) -> Spread | None:
    grpc = variant["grpc"] or {}
    if not (names := points(grpc, prefix)):
        return None
    point, rate = grpc[names[-1]], "inferences_per_second"
    least, most = (point.get(f"{rate}_{end}", point[rate]) for end in ("min", "max"))
    return Spread(point[rate], least, most)


def _routed(variant: Variant) -> Spread | None:
    return _served_rate(variant, "router_concurrency_")


def _throughput(variant: Variant) -> Spread | None:
    return (
        _swept_spread("throughput", variant)
        or _served_rate(variant, "concurrency_")
        or _routed(variant)
    )


def _inside(variant: Variant) -> Spread | None:
    return _swept_spread("throughput", variant) or _rate_inside(variant)


def _rate_inside(variant: Variant) -> Spread | None:
    best = variant["in_process"]["best_batch"]
    value = variant["in_process"][f"batch_{best}"]["inferences_per_second"]
    return _within(value, [best / seconds for seconds in _quarters(variant, best)])


def _call(variant: Variant) -> Spread | None:
    point = variant["in_process"].get("batch_1")
    if point is None:
        return None
    return _within(point["p50_ms"], [1e3 * seconds for seconds in _quarters(variant, 1)])


def _within(value: float, ends: Sequence[float]) -> Spread:
    return Spread(value, min([value, *ends]), max([value, *ends]))


def _quarters(variant: Variant, batch: int) -> list[float]:
    """Return the quartiles of the calls' times; empty without raw samples. Units: seconds."""
    seconds = variant.get("samples", {}).get("in_process_s", {}).get(str(batch))
    return [float(quarter) for quarter in np.percentile(seconds, (25, 75))] if seconds else []


def _latency(variant: Variant) -> Spread | None:
    grpc = variant["grpc"] or {}
    names = [name for name in ("router_concurrency_1", "concurrency_1") if name in grpc]
    return _swept_spread("latency", variant) or _exact(grpc[names[0]]["p95_ms"] if names else None)


def _macs(variant: Variant) -> Spread | None:
    # Only the component that takes the image: others answer separate requests, or run many times
    # per request.
    return _exact(variant["files"][0]["multiply_adds"])


def _memory(variant: Variant) -> Spread | None:
    return _swept_spread("memory", variant, 2.0**20)


def latencies(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return percentiles of a request's time by path and concurrency; empty without raw samples.

    Units: milliseconds.
    """
    paths = []
    for prefix, title in _PATHS:
        if names := _measured(variants, prefix):
            boxes = [[_percentiles(_raw_ms(one, name)) for one in variants] for name in names]
            paths.append({"title": title, "clients": list(map(clients_of, names)), "boxes": boxes})
    return paths


def _measured(variants: Sequence[Variant], prefix: str) -> list[str]:
    return points({name for variant in variants for name in _rounds(variant)}, prefix)


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
    loads = []
    for name in _measured(report["variants"], "router_concurrency_"):
        rows = [_stages(report["model"], variant, name) for variant in report["variants"]]
        if any(rows):
            loads.append({"clients": clients_of(name), "rows": rows})
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
