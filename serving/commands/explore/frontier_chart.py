# SPDX-License-Identifier: Apache-2.0
"""The frontier of an artefact folder as a chart: variants, policies, and who answered."""

import math
from pathlib import Path
from typing import Any

from saccade.exporter.artefact.frontier import (
    FILE_NAME,
    Frontier,
    FrontierEntry,
    PolicyEntry,
    read_frontier,
)
from saccade.exporter.policy.options import check_policy_name

_GREY, _COLOUR, _MARKED, _STAR = "#8a8f98", "#0072b2", "#d55e00", "#cc79a7"
_CLOSE, _LINE_PX = 0.1, 14  # share of the axis that a label needs, and the height of a line
# A star with five points around (0, 0).
_STAR_PATH = (
    "path://M0,-10 L2.4,-3.2 9.5,-3.1 3.8,1.2 5.9,8.1 0,4 -5.9,8.1 -3.8,1.2 -9.5,-3.1 -2.4,-3.2 Z"
)


def measured(folder: Path | None) -> Frontier | None:
    """Return the folder's measurements on the device measured first, or None.

    Raises: SaccadeError if the file is not a frontier.
    """
    if folder is None or not (folder / FILE_NAME).is_file():
        return None
    found = read_frontier(folder / FILE_NAME)
    place = {(entry.device, entry.runtime) for entry in found.entries[:1]}
    if not place:
        return None
    for policy in found.policies:
        check_policy_name(policy.policy)  # it is put into the page
    return Frontier(
        found.model,
        tuple(entry for entry in found.entries if (entry.device, entry.runtime) in place),
        tuple(policy for policy in found.policies if (policy.device, policy.runtime) in place),
    )


def chart(frontier: Frontier, variant: str) -> dict[str, Any]:
    """Return ECharts options for a scatter plot of score against latency or throughput.

    Throughput is used if no latency was measured. Policies have another mark, and are drawn if
    they were measured in the same way.
    Units: latency is the p95 of one request at a time, through the server.
    """
    entries = frontier.entries
    by_latency = all(entry.p95_ms is not None for entry in entries)
    score = entries[0].score
    axis = "p95 latency, ms" if by_latency else "images per second"
    fixed = [_point(entry, by_latency, marked=entry.variant == variant) for entry in entries]
    in_process = all(entry.grpc is None for entry in entries)
    chains = [
        (policy, cost)
        for policy in frontier.policies
        if (cost := _cost(policy, by_latency, in_process)) is not None
    ]
    stars = [_star(policy, cost) for policy, cost in chains]
    points = [*fixed, *stars]
    _lower_labels(stars, [point["value"][0] for point in points])
    # Safe to put into the page: names of variants are letters, digits and hyphens.
    intervals_of = [entry.score.interval for entry in entries]
    intervals_of += [policy.score.interval for policy, _ in chains]
    bars = [
        {"coords": [[p["value"][0], low], [p["value"][0], high]]}
        for p, (low, high) in zip(points, intervals_of, strict=True)
    ]
    scatter = {
        "type": "scatter", "name": "fixed budget", "data": fixed, "symbolSize": 14,
        "color": _COLOUR, "label": {"show": True, "position": "right", "color": _GREY},
    }  # fmt: skip
    policies = {
        "type": "scatter", "name": "policy", "data": stars, "symbol": _STAR_PATH, "symbolSize": 20,
        "color": _STAR, "label": {"show": True, "position": "bottom", "color": _STAR},
    }  # fmt: skip
    intervals = {
        "type": "lines", "coordinateSystem": "cartesian2d", "data": bars, "silent": True,
        "lineStyle": {"color": _GREY, "width": 1.5, "opacity": 0.8}, "z": 1,
    }  # fmt: skip
    lows, highs = zip(*intervals_of, strict=True)
    room = 0.1 * (max(highs) - min(lows)) or 0.01
    span = (min(lows) - room, max(highs) + room)
    unit = f", {score.unit}" if score.unit else ""
    return {
        "textStyle": {"color": _GREY},
        "tooltip": {"trigger": "item", "formatter": "{b}: {c}"},
        "grid": {"left": 60, "right": 90, "top": 20, "bottom": 50},
        "xAxis": _axis(axis), "yAxis": _axis(f"{score.name}{unit}", span),
        "series": [intervals, scatter, *([policies] if stars else [])],
        **({"legend": {"top": 0, "data": ["fixed budget", "policy"], "textStyle": {"color": _GREY}}}
           if stars else {}),
    }  # fmt: skip


def _cost(policy: PolicyEntry, by_latency: bool, in_process: bool) -> float | None:
    """Return the policy's place on the axis; None if only something else was measured."""
    if by_latency:
        point = (policy.grpc or {}).get("router_concurrency_1")
        return None if point is None else float(point["p95_ms"])
    if not in_process:
        return None
    inside = policy.in_process
    return float(inside[f"batch_{inside['best_batch']}"]["inferences_per_second"])


def _lower_labels(stars: list[dict[str, Any]], places: list[float]) -> None:
    """Give the labels of policies that are close to each other different heights."""
    close = _CLOSE * (max(places) - min(places))
    before, rows = -math.inf, 0
    for star in sorted(stars, key=lambda star: star["value"][0]):
        rows = rows + 1 if star["value"][0] - before < close else 0
        before = star["value"][0]
        star["label"]["offset"] = [0, _LINE_PX * rows]


def _star(policy: PolicyEntry, cost: float) -> dict[str, Any]:
    times = f"{policy.times_full.times:.2g} times the full model's throughput"
    return {
        "name": f"policy {policy.policy}, {times}",
        "label": {"formatter": policy.policy},
        "value": [round(cost, 3), policy.score.value],
    }


def _point(entry: FrontierEntry, by_latency: bool, *, marked: bool) -> dict[str, Any]:
    cost = entry.p95_ms if by_latency else entry.speed
    assert cost is not None
    budget = f"budget {entry.budget:g} {entry.precision}"
    return {
        "name": f"{budget}  ◂ this answer" if marked else budget,
        "label": {"formatter": f"{entry.budget:.3g}"},
        "value": [round(cost, 3), entry.score.value],
        "itemStyle": {"color": _MARKED if marked else _COLOUR},
        "symbolSize": 20 if marked else 12,
    }


def _axis(name: str, span: tuple[float, float] | None = None) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "type": "value", "name": name, "nameLocation": "middle", "nameGap": 42 if span else 28,
        "scale": True, "axisLabel": {"color": _GREY}, "splitLine": {"lineStyle": {"opacity": 0.25}},
    }  # fmt: skip
    if span:
        digits = max(0, 1 - math.floor(math.log10(span[1] - span[0])))
        axis |= {"min": round(span[0], digits), "max": round(span[1], digits)}
    return axis
