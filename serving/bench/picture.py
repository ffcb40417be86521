# SPDX-License-Identifier: Apache-2.0
"""Draw the frontier: score against what the budget saves, from the report alone."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.core.errors import require
from saccade.serving.bench.figures import (
    cost_of,
    has_rounds,
    heading,
    is_share,
    saves_bytes,
    score_text,
    shown,
    split_text,
    throughput_of,
)
from saccade.serving.bench.report_charts import short_name
from saccade.serving.bench.report_policies import can_be_drawn, policies_of, times_digits

_MARKERS = {"fp32": "o", "fp16": "s", "bf16": "D", "int8": "^"}
_FRONTIER, _DOMINATED, _GRID, _INK = "#0b6e99", "#8a8f98", "#e3e6ea", "#22262b"
# From this ratio of fastest to slowest, a linear axis would squeeze the slow half together.
_LOG_FROM_RATIO = 4.0
_STARS, _STAR = "stars", "#c2571a"  # key and color of policies that are drawn
# Of the nearest part of a label to its point, in points; and directions, the first preferred.
_DISTANCES = (9.0, 16.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0, 128.0)
_ANGLES = tuple(
    math.radians(angle)
    for angle in (40, -40, 140, 220, 90, 270, 0, 180, 65, 115, -65, -115, 20, -20, 160, 200)
)
_NEAR = 0.22  # inches up to which a label needs no line
_TURNS = 6
_RADIUS = 8.0  # pixels around a point that no label should cover
_GAP = 4.0  # pixels between labels
_TINY = 1e-9
_CROWDED = 5  # with more points, labels are budgets only: the tables have the rest


def frontier_png(report: dict[str, Any]) -> bytes:
    """Return the image as PNG bytes.

    Raises: MissingPackage without matplotlib.
    """
    matplotlib = require("matplotlib", extra="bench")
    buffer = io.BytesIO()
    # Names are plain text: matplotlib would read text between two dollar signs as a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        # Without a date and a version, the same figures give the same bytes.
        _figure(report).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _figure(report: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if can_be_drawn(report):
        report = _beside_policies(report)
    figure = Figure(figsize=(8.0, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_frontier(axes, report["variants"])
    for point in _points(report):
        _draw_point(axes, point)
    _dress(axes, report)
    _name_markers(axes, report)
    figure.suptitle(
        f"{report['model']} on {report['data']['name']}: score against {_axis(report)}",
        x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.supxlabel(_caption(report), x=0.01, ha="left", fontsize=7.5, color="#5b626b")
    _name_points(axes, report)
    return figure


def _beside_policies(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the speeds in process, which variants and policies both have.

    If a server was measured, dominated variants were found by its speeds, so none is marked.
    """
    by_server = bool(report["server"])
    variants = [
        {**variant, "grpc": None} | ({"dominated_by": None} if by_server else {})
        for variant in report["variants"]
    ]
    stars = [{**one, "grpc": None, "dominated_by": None} for one in policies_of(report)]
    return {**report, "variants": variants, _STARS: stars}


def _points(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variants, and the policies if they are drawn."""
    return [*report["variants"], *report.get(_STARS, ())]


def _draw_frontier(axes: Any, variants: list[dict[str, Any]]) -> None:
    kept = sorted(
        (cost_of(variant), _height(variant))
        for variant in variants
        if variant["dominated_by"] is None
    )
    if not kept:
        return
    # A staircase. For a speed between two points it shows the best score that is at least as fast;
    # for a number of bytes, the best score with at most as many.
    places, scores = zip(*kept, strict=True)
    best = max if variants[0]["score"]["higher_is_better"] else min
    if saves_bytes(variants[0]):
        heights, where = [best(scores[: index + 1]) for index in range(len(kept))], "post"
    else:
        heights, where = [best(scores[index:]) for index in range(len(kept))], "pre"
    axes.step(places, heights, where=where, color=_FRONTIER, lw=2.2, alpha=0.35, zorder=2)


def _height(variant: dict[str, Any]) -> float:
    return shown(variant["score"], variant["score"]["value"])


def _ends(variant: dict[str, Any]) -> tuple[float, float]:
    low, high = (shown(variant["score"], bound) for bound in variant["score"]["interval"])
    return low, high


def _axis(report: dict[str, Any]) -> str:
    return "size of an embedding" if saves_bytes(report["variants"][0]) else "throughput"


def _rounds(variant: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest value of single rounds, if a sweep recorded them."""
    name = "embedding bytes" if saves_bytes(variant) else "throughput"
    cost = variant.get("costs", {}).get(name)
    return (cost["least"], cost["most"]) if cost else (cost_of(variant), cost_of(variant))


def _name_markers(axes: Any, report: dict[str, Any]) -> None:
    """Add a legend of the markers, if there are several precisions, or policies."""
    from matplotlib.lines import Line2D

    precisions = [
        precision
        for precision in _MARKERS
        if precision in {variant["precision"] for variant in report["variants"]}
    ]
    stars = bool(report.get(_STARS))
    names = precisions if len(precisions) > 1 else ["fixed budget"] * stars
    marks = [
        Line2D([], [], ls="", marker=_MARKERS[precision], color=_INK, ms=7, label=name)
        for precision, name in zip(precisions, names, strict=False)
    ]
    if stars:
        marks.append(Line2D([], [], ls="", marker="*", color=_STAR, ms=12, label="policy"))
    if marks:
        axes.legend(handles=marks, fontsize=9, frameon=False, loc="best")


def _draw_point(axes: Any, variant: dict[str, Any]) -> None:
    place, score = cost_of(variant), _height(variant)
    low, high = _ends(variant)
    dominated = variant["dominated_by"] is not None
    star = "policy" in variant
    colour = _STAR if star else _DOMINATED if dominated else _FRONTIER
    least, most = _rounds(variant)
    axes.errorbar(  # under the labels, which are under the points
        [place], [score], yerr=[[max(0.0, score - low)], [max(0.0, high - score)]],
        xerr=[[max(0.0, place - least)], [max(0.0, most - place)]],
        fmt="none", ecolor=colour, elinewidth=1.0, capsize=3, zorder=2.2,
    )  # fmt: skip
    axes.plot(
        [place], [score], "*" if star else _MARKERS[variant["precision"]], ms=15 if star else 8,
        mew=1.6 - star, color=colour, mfc="white" if dominated else colour, zorder=3 + star,
    )  # fmt: skip


def _name_points(axes: Any, report: dict[str, Any]) -> None:
    """Label each point where its label covers least, with a line to it if it is far away."""
    figure, points = axes.figure, _points(report)
    figure.draw_without_rendering()
    labels = [_label(axes, point, report) for point in points]
    sizes = [words.get_window_extent() for words in labels]
    places = [(cost_of(point), _height(point)) for point in points]
    legend = axes.get_legend()
    surroundings = Surroundings(
        points=axes.transData.transform(places),
        bars=np.array([_box(axes, [(cost_of(one), end) for end in _ends(one)]) for one in points]),
        legend=_corners([legend.get_window_extent()] if legend else []),
        inside=_corners([axes.get_window_extent()]),
    )
    boxes = placed(
        surroundings,
        [(size.width, size.height) for size in sizes],
        [point["dominated_by"] is not None for point in points],
        figure.dpi / 72,
    )
    lines = _leaders(surroundings.points, boxes)
    to_data = axes.transData.inverted()
    for words, box, point, line in zip(labels, boxes, points, lines, strict=True):
        words.set_position(to_data.transform((box[:2] + box[2:]) / 2))
        if "policy" in point or np.hypot(*(line[2:] - line[:2])) > _NEAR * figure.dpi:
            ends = to_data.transform(line.reshape(2, 2))
            axes.plot(*ends.T, color=words.get_color(), lw=0.7, zorder=2.4)


def _label(axes: Any, point: dict[str, Any], report: dict[str, Any]) -> Any:
    """Return the label of a point, centered at it."""
    dominated = point["dominated_by"] is not None
    return axes.text(
        cost_of(point), _height(point), _words(point, report), ha="center", va="center",
        fontsize=9, zorder=2.5,  # over bars, but never over a point
        color=_STAR if "policy" in point else _DOMINATED if dominated else _INK,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
    )  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """What labels should not cover: points and the legend, less so bars; and where they may be.

    Shapes: points [n 2], (x, y); the others are boxes [k 4]: left, low, right, high.
    Units: pixels.
    """

    points: np.ndarray
    bars: np.ndarray
    legend: np.ndarray
    inside: np.ndarray

    def costs(self, at: int, boxes: np.ndarray, others: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return how bad each of these boxes would be for the label of the point `at`.

        `others` are the boxes of other labels.
        Shapes: boxes [c 4] -> [c].
        """
        points = np.hstack([self.points - _RADIUS, self.points + _RADIUS])
        there = np.array([*others.values()]).reshape(-1, 4)
        apart = there + np.array([-_GAP, -_GAP, _GAP, _GAP])
        solid = np.vstack([points, apart, self.legend])
        outside = _area(boxes) - _common(boxes, self.inside).sum(1)
        lines = _leaders(np.broadcast_to(self.points[at], (len(boxes), 2)), boxes)
        their = _leaders(self.points[[*others]], there)
        crossed = _enters(lines, there) | _enters(their, boxes).T | _meet(lines, their)
        hidden = _enters(lines, np.delete(points, at, 0))
        far = np.hypot(*(lines[:, 2:] - lines[:, :2]).T)
        rest = np.delete(self.points, at, 0)[None]
        nearest = np.clip(rest, boxes[:, None, :2], boxes[:, None, 2:])
        # A reader takes a label for that of the point that is nearest to it.
        unclear = np.hypot(*np.moveaxis(nearest - rest, -1, 0)) < far[:, None] + _GAP
        return np.asarray(
            8 * _common(boxes, solid).sum(1)
            + 20 * outside
            + 600 * crossed.sum(1)
            + 500 * hidden.sum(1)
            + 0.5 * _common(boxes, self.bars).sum(1)
            + 100 * unclear.sum(1)
            + 1.5 * far
        )


def placed(
    surroundings: Surroundings,
    sizes: Sequence[tuple[float, float]],
    below: Sequence[bool],
    scale: float,
) -> np.ndarray:
    """Return a box for each label, near its point; those of `below` rather at the lower left.

    Each label moves to its best place in turn, until none moves.

    Shapes: -> [n 4].
    Units: pixels, of which `scale` are a point.
    """
    tries = [
        _tries(point, size, down, scale)
        for point, size, down in zip(surroundings.points, sizes, below, strict=True)
    ]
    chosen: dict[int, np.ndarray] = {}
    for _ in range(_TURNS):
        before = {at: box.tolist() for at, box in chosen.items()}
        for at, boxes in enumerate(tries):
            others = {place: box for place, box in chosen.items() if place != at}
            costs = surroundings.costs(at, boxes, others) + np.arange(len(boxes))
            chosen[at] = boxes[costs.argmin()]
        if before == {at: box.tolist() for at, box in chosen.items()}:
            break
    return np.array([chosen[at] for at in range(len(tries))])


def _tries(point: np.ndarray, size: tuple[float, float], below: bool, scale: float) -> np.ndarray:
    """Return boxes of this size around a point, those that readers expect first.

    Shapes: point [2] -> [c 4].
    """
    distance, angle = (grid.ravel() for grid in np.meshgrid(_DISTANCES, _ANGLES, indexing="ij"))
    way = (-1 if below else 1) * np.stack([np.cos(angle), np.sin(angle)], 1)
    # Beside the point begins a corner of the box, and above or below it the middle of a side.
    low = point + scale * distance[:, None] * way + size * (np.clip(1.5 * way, -1, 1) - 1) / 2
    return np.hstack([low, low + size])


def _box(axes: Any, ends: list[tuple[float, float]]) -> list[float]:
    """Return the box around these places of the data. Units: pixels."""
    from matplotlib.transforms import Bbox

    return list(Bbox(axes.transData.transform(ends)).padded(2).extents)


def _corners(boxes: Sequence[Any]) -> np.ndarray:
    return np.array([box.extents for box in boxes]).reshape(-1, 4)


def _area(boxes: np.ndarray) -> np.ndarray:
    return np.asarray(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))


def _common(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the area that boxes share.

    Shapes: some [c 4], others [o 4] -> [c o].
    Units: square pixels.
    """
    one, other = some[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    return np.asarray(np.maximum(sides, 0).prod(-1))


def _leaders(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return the line from each point to the nearest place of its label: x, y, x, y.

    Shapes: points [c 2], boxes [c 4] -> [c 4].
    """
    return np.hstack([points, np.clip(points, boxes[:, :2], boxes[:, 2:])])


def _enters(lines: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return whether lines enter boxes, by the share of the line that is between opposite sides.

    Shapes: lines [c 4], boxes [o 4] -> bool [c o].
    """
    start, way = lines[:, None, :2], (lines[:, 2:] - lines[:, :2])[:, None]
    way = np.where(np.abs(way) < _TINY, _TINY, way)
    ends = np.stack([(boxes[None, :, :2] - start) / way, (boxes[None, :, 2:] - start) / way])
    first, last = ends.min(0).max(-1), ends.max(0).min(-1)
    return np.asarray(np.maximum(first, 0) < np.minimum(last, 1))


def _meet(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return whether lines cross between their ends.

    Shapes: some [c 4], others [o 4] -> bool [c o].
    """

    def side(line: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        from_x, from_y, to_x, to_y = np.moveaxis(line, -1, 0)
        return np.asarray((to_x - from_x) * (y - from_y) - (to_y - from_y) * (x - from_x))

    def parts(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return side(one, other[..., 0], other[..., 1]) * side(one, other[..., 2], other[..., 3]) < 0

    one, other = some[:, None], others[None]
    return parts(one, other) & parts(other, one)


def _is_crowded(report: dict[str, Any]) -> bool:
    return len(report["variants"]) > _CROWDED


def _words(variant: dict[str, Any], report: dict[str, Any]) -> str:
    if "policy" in variant:
        times = f"{times_digits(variant['times_full']['times'])}x"
        name = f"{variant['policy']} · {times}"
        return name if _is_crowded(report) else f"{name} · {score_text(variant['score'])}"
    if _is_crowded(report):
        return f"{variant['budget']:g}"
    name = f"budget {variant['budget']:g} · {score_text(variant['score'])}"
    if variant["precision"] != "fp32":
        name = f"{variant['precision']}, {name}"
    if variant["dominated_by"] is None:
        return name
    return f"{name}\ndominated by {short_name(report, variant['dominated_by'])}"


def _dress(axes: Any, report: dict[str, Any]) -> None:
    first = report["variants"][0]
    places = [end for variant in _points(report) for end in _rounds(variant)]
    low, high = min(places), max(places)
    left, right = 0.12, 0.4  # room for the label of the rightmost point
    if high / low >= _LOG_FROM_RATIO:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(low / (high / low) ** left, high * (high / low) ** right)
    else:
        span = high - low or high
        axes.set_xlim(low - left * span, high + right * span)
    if saves_bytes(first):  # there are few sizes, one per budget
        axes.set_xticks(sorted(set(places)))
        axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed = f"inferences per second, {throughput_of(first)[1]}"
    axes.set_xlabel("bytes per embedding" if saves_bytes(first) else speed)
    sign = ", %" if is_share(first["score"]) else ""
    name = first["score"]["name"] if sign else heading(first["score"])
    axes.set_ylabel(f"{name} on {split_text(report['data'])}{sign}")
    axes.margins(y=0.12)
    axes.grid(True, color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(report: dict[str, Any]) -> str:
    machine = report["machine"]
    bytes_saved = saves_bytes(report["variants"][0])
    fast = "surely no slower" if has_rounds(report["variants"]) else "at least as fast"
    cheap = "no larger" if bytes_saved else fast
    swept = "costs" in report["variants"][0] and not bytes_saved
    rounds = ", horizontal bars the range of rounds" if swept else ""
    named = " Numbers are budgets." if _is_crowded(report) else ""
    start = (
        f"{machine['runtime']}, 1 thread, on {machine['device']}. {report['data']['n']} test "
        f"samples.\nVertical bars are 95 % intervals{rounds}.{named}"
    )
    if report.get(_STARS):
        start += " 2.0x: twice the throughput of the full model.\nA policy is a chain of variants."
        if report["server"]:
            return start
    return (
        f"{start} Hollow points are dominated: "
        f"another variant is\n{cheap} and scores better, beyond the paired 95 % interval of the "
        "difference."
    )
