# SPDX-License-Identifier: Apache-2.0
"""The frontier of an artefact folder as a chart, with the answering variant marked."""

import math
from pathlib import Path
from typing import Any

from saccade.exporter.artefact.frontier import FILE_NAME, Entry, read_frontier

_GREY, _COLOUR, _MARKED = "#8a8f98", "#0072b2", "#d55e00"


def measured(folder: Path | None) -> tuple[Entry, ...]:
    """Return the folder's measurements on the device measured first, or none.

    Raises: SaccadeError if the file is not a frontier.
    """
    if folder is None or not (folder / FILE_NAME).is_file():
        return ()
    entries = read_frontier(folder / FILE_NAME).entries
    place = {(entry.device, entry.runtime) for entry in entries[:1]}
    return tuple(entry for entry in entries if (entry.device, entry.runtime) in place)


def chart(entries: tuple[Entry, ...], variant: str) -> dict[str, Any]:
    """Return ECharts options for a scatter plot of score against latency or throughput.

    Throughput is used if no latency was measured.
    Units: latency is the p95 of one request at a time, through the server.
    """
    by_latency = all(entry.p95_ms is not None for entry in entries)
    score = entries[0].score
    axis = "p95 latency, ms" if by_latency else "images per second"
    points = [_point(entry, by_latency, marked=entry.variant == variant) for entry in entries]
    # Safe to put into the page: names of variants are letters, digits and hyphens.
    bars = [
        {"coords": [[p["value"][0], low], [p["value"][0], high]]}
        for p, (low, high) in zip(points, (entry.score.interval for entry in entries), strict=True)
    ]
    scatter = {
        "type": "scatter", "data": points, "symbolSize": 14,
        "label": {"show": True, "position": "right", "color": _GREY},
    }  # fmt: skip
    intervals = {
        "type": "lines", "coordinateSystem": "cartesian2d", "data": bars, "silent": True,
        "lineStyle": {"color": _GREY, "width": 1.5, "opacity": 0.8}, "z": 1,
    }  # fmt: skip
    lows, highs = zip(*(entry.score.interval for entry in entries), strict=True)
    room = 0.1 * (max(highs) - min(lows)) or 0.01
    span = (min(lows) - room, max(highs) + room)
    unit = f", {score.unit}" if score.unit else ""
    return {
        "textStyle": {"color": _GREY},
        "tooltip": {"trigger": "item", "formatter": "{b}: {c}"},
        "grid": {"left": 60, "right": 90, "top": 20, "bottom": 50},
        "xAxis": _axis(axis), "yAxis": _axis(f"{score.name}{unit}", span),
        "series": [intervals, scatter],
    }  # fmt: skip


def _point(entry: Entry, by_latency: bool, *, marked: bool) -> dict[str, Any]:
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
