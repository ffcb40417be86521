# SPDX-License-Identifier: Apache-2.0
"""Draw the frontier: score against the main cost, as the page draws it, from the report alone."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from saccade.core.errors import require
from saccade.serving.bench.figures import (
    has_rounds,
    heading,
    is_share,
    policies_of,
    saves_bytes,
    split_text,
    times_digits,
)
from saccade.serving.bench.report_charts import (
    axes,
    drawn_axis,
    policy_marks,
    short_name,
    variant_marks,
)

_MARKERS = {"fp32": "o", "fp16": "s", "bf16": "D", "int8": "^"}
_FRONTIER, _DOMINATED, _GRID, _INK, _STAR = "#0b6e99", "#8a8f98", "#e3e6ea", "#22262b", "#c2571a"
# Of the nearest part of a label to its point, in points; and directions, the first preferred.
_DISTANCES = (9.0, 16.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0, 128.0)
_ANGLES = np.radians((40, -40, 140, 220, 90, 270, 0, 180, 65, 115, -65, -115, 20, -20, 160, 200))
_NEAR = 16.0  # points up to which a label needs no line
_RADIUS = 8.0  # pixels around a point that no label should cover
_GAP = 2.0  # pixels around a label
_CROWDED = 5  # with more points, labels are budgets only: the tables have the rest


@dataclass(frozen=True)
class Mark:
    """A point of the image: its place with the ends of its bars, and its looks."""

    x: dict[str, float]  # value, least and most
    y: dict[str, Any]  # score, low and high
    label: str
    kind: str  # precision of a variant, or policy
    dominated: bool

    @property
    def is_policy(self) -> bool:
        """Whether it is a chain of variants."""
        return self.kind == "policy"

    @property
    def marker(self) -> str:
        """The shape."""
        return "*" if self.is_policy else _MARKERS[self.kind]

    @property
    def colour(self) -> str:
        """The color of the point and its bars."""
        return _STAR if self.is_policy else _DOMINATED if self.dominated else _FRONTIER

    @property
    def place(self) -> tuple[float, float]:
        """Cost and score."""
        return self.x["value"], self.y["score"]


def frontier_png(report: dict[str, Any]) -> bytes:
    """Return the image as PNG bytes.

    Raises: MissingPackage without matplotlib.
    """
    matplotlib = require("matplotlib", extra="bench")
    buffer = io.BytesIO()
    # Names are plain text: matplotlib would read text between two dollar signs as a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        # Without a date and a version, the same figures give the same bytes.
        frontier_figure(report).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def frontier_figure(report: dict[str, Any]) -> Any:
    """Return the image as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis = drawn_axis(axes(report)[0], report)
    marks = _marks(report, axis)
    figure = Figure(figsize=(8.0, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    _draw_frontier(plot, marks, axis, report["variants"][0]["score"]["higher_is_better"])
    for mark in marks:
        _draw_point(plot, mark)
    _dress(plot, marks, axis, report)
    _name_markers(plot, marks)
    saved = "size of an embedding" if saves_bytes(report["variants"][0]) else "throughput"
    figure.suptitle(
        f"{report['model']} on {report['data']['name']}: score against {saved}",
        x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    caption = _caption(report, axis, marks)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7.5, color="#5b626b")
    _name_points(plot, marks)
    return figure


def _marks(report: dict[str, Any], axis: dict[str, Any]) -> list[Mark]:
    crowded = len(report["variants"]) > _CROWDED
    marks = []
    for one, x, rival in zip(
        variant_marks(report), axis["points"], axis["dominated_by"], strict=True
    ):
        label = f"budget {one['budget']} · {one['score_text']}"
        label = label if one["precision"] == "fp32" else f"{one['precision']}, {label}"
        label += f"\ndominated by {short_name(report, rival)}" if rival else ""
        label = one["budget"] if crowded else label
        marks.append(Mark(x, one, label, one["precision"], rival is not None))
    for one, x, policy in zip(
        policy_marks(report), axis["policies"], policies_of(report), strict=True
    ):
        label = f"{one['name']} · {times_digits(policy['times_full']['times'])}x"
        label += "" if crowded else f" · {one['score_text']}"
        if x is not None:
            marks.append(Mark(x, one, label, "policy", False))
    return marks


def _draw_frontier(plot: Any, marks: Sequence[Mark], axis: dict[str, Any], higher: bool) -> None:
    """Draw a staircase: for each cost, the best score of all variants that cost no more."""
    kept = sorted(mark.place for mark in marks if not (mark.dominated or mark.is_policy))
    faster = axis["more_is_better"]
    places, scores = np.array(kept[::-1] if faster else kept).reshape(-1, 2).T
    heights = (np.maximum if higher else np.minimum).accumulate(scores)
    plot.step(places, heights, where="post", color=_FRONTIER, lw=2.2, alpha=0.35, zorder=2)


def _draw_point(plot: Any, mark: Mark) -> None:
    (x, y), star = mark.place, mark.is_policy
    plot.errorbar(  # under the labels, which are under the points
        [x], [y], yerr=[[max(0.0, y - mark.y["low"])], [max(0.0, mark.y["high"] - y)]],
        xerr=[[max(0.0, x - mark.x["least"])], [max(0.0, mark.x["most"] - x)]],
        fmt="none", ecolor=mark.colour, elinewidth=1.0, capsize=3, zorder=2.2,
    )  # fmt: skip
    plot.plot(
        [x], [y], mark.marker, ms=15 if star else 8, mew=1.6 - star, color=mark.colour,
        mfc="white" if mark.dominated else mark.colour, zorder=3 + star,
    )  # fmt: skip


def _dress(plot: Any, marks: Sequence[Mark], axis: dict[str, Any], report: dict[str, Any]) -> None:
    ends = [mark.x[end] for mark in marks for end in ("least", "most")]
    low, high = min(ends), max(ends)
    left, right = 0.12, 0.4  # room for the label of the rightmost point
    if axis["log"]:
        from matplotlib.ticker import LogLocator, NullFormatter

        plot.set_xscale("log")
        plot.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        plot.xaxis.set_minor_formatter(NullFormatter())
        plot.set_xlim(low / (high / low) ** left, high * (high / low) ** right)
    else:
        span = high - low or high
        plot.set_xlim(low - left * span, high + right * span)
    if saves_bytes(report["variants"][0]):  # there are few sizes, one per budget
        plot.set_xticks(sorted(set(ends)))
        plot.set_xticks([], minor=True)
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    plot.set_xlabel(axis["label"])
    score = report["variants"][0]["score"]
    name = f"{heading(score).removesuffix(' %')} on {split_text(report['data'])}"
    plot.set_ylabel(f"{name}, %" if is_share(score) else name)
    plot.margins(y=0.12)
    plot.grid(True, color=_GRID, lw=0.8)
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)


def _name_markers(plot: Any, marks: Sequence[Mark]) -> None:
    """Add a legend of the markers, if there are several precisions, or policies."""
    from matplotlib.lines import Line2D

    kinds = {mark.kind: mark for mark in marks}
    alone = "fixed budget" if len(kinds.keys() - {"policy"}) == 1 else None
    lines = [
        Line2D(
            [], [], ls="", marker=mark.marker, color=_STAR if mark.is_policy else _INK,
            ms=12 if mark.is_policy else 7, label=kind if mark.is_policy else alone or kind,
        )
        for kind, mark in kinds.items()
    ]  # fmt: skip
    if len(lines) > 1:
        plot.legend(handles=lines, fontsize=9, frameon=False, loc="best")


def _name_points(plot: Any, marks: Sequence[Mark]) -> None:
    """Label each point at the first free place around it, with a line to it if that is far away.

    A label covers no point, legend or other label, and no vertical bar if it can. Its line crosses
    none of them, and no other line.
    """
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    plot.figure.draw_without_rendering()
    scale, inside, to_data = plot.figure.dpi / 72, plot.get_window_extent(), plot.transData
    points = to_data.transform([mark.place for mark in marks])
    bars = [to_data.transform([(m.x["value"], m.y[end]) for end in ("low", "high")]) for m in marks]
    bars = [Bbox(bar).padded(_GAP) for bar in bars]
    taken = [Bbox([point - _RADIUS, point + _RADIUS]) for point in points]
    legend = [plot.get_legend().get_window_extent()] if plot.get_legend() else []
    lines: list[Any] = []
    line: Any

    def is_free(box: Any, line: Any, obstacles: Sequence[Any]) -> bool:
        others = [other for other in taken + legend if not other.contains(*line.vertices[0])]
        return (
            all(inside.contains(*corner) for corner in (box.min, box.max))
            and not box.count_overlaps([*taken, *legend, *obstacles])
            and not any(line.intersects_bbox(other, filled=False) for other in others)
            and not any(
                line.intersects_path(other, filled=False)
                or other.intersects_bbox(box, filled=False)
                for other in lines
            )
        )

    for mark, point in zip(marks, points, strict=True):
        text = plot.text(
            *mark.place, mark.label, ha="center", va="center", fontsize=9, zorder=2.5,
            color=mark.colour if mark.is_policy or mark.dominated else _INK,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
        )  # fmt: skip
        size = text.get_window_extent().size
        boxes = [Bbox([low, low + size]) for low in _corners(point, size, mark.dominated, scale)]
        for obstacles, box in product((bars, ()), boxes):
            line = Path([point, np.clip(point, box.min, box.max)])
            if is_free(box, line, obstacles):
                break
        else:  # rather over something than far away
            box, line = boxes[0], Path([point, point])
        text.set_position(to_data.inverted().transform(box.min + size / 2))
        taken.append(box.padded(_GAP))
        lines.append(line)
        if mark.is_policy or np.hypot(*(line.vertices[1] - point)) > _NEAR * scale:
            to, colour = to_data.inverted().transform(line.vertices).T, text.get_color()
            plot.plot(*to, color=colour, lw=0.7, zorder=2.4)


def _corners(point: np.ndarray, size: np.ndarray, below: bool, scale: float) -> Iterator[Any]:
    """Yield the lower left corners of boxes around a point, those that readers expect first."""
    for distance in _DISTANCES:
        for angle in _ANGLES:
            way = (-1 if below else 1) * np.array([np.cos(angle), np.sin(angle)])
            # Beside the point begins a corner of the box, and above or below it the middle of a
            # side.
            yield point + scale * distance * way + size * (np.clip(1.5 * way, -1, 1) - 1) / 2


def _caption(report: dict[str, Any], axis: dict[str, Any], marks: Sequence[Mark]) -> str:
    machine, saved = report["machine"], saves_bytes(report["variants"][0])
    fast = "surely no slower" if has_rounds(report["variants"]) else "at least as fast"
    bars = f", horizontal bars the {axis['bars']}" if axis["bars"] else ""
    words = [
        f"{machine['runtime']}, 1 thread, on {machine['device']}. {report['data']['n']} test "
        f"samples.\nVertical bars are 95 % intervals{bars}."
    ]
    if len(report["variants"]) > _CROWDED:
        words.append("Numbers are budgets.")
    if any(mark.is_policy for mark in marks):
        words.append("2.0x: twice the throughput of the full model.\nA policy is a chain of")
        words.append("variants.")
    if axis["judged"]:
        words.append(
            f"Hollow points are dominated: another variant is\n{'no larger' if saved else fast} "
            "and scores better, beyond the paired 95 % interval of the difference."
        )
    return " ".join(words)
