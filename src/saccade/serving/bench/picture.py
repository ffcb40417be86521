# SPDX-License-Identifier: Apache-2.0
"""Draw the frontier: score against what the budget saves, from the report alone."""

import io
from typing import Any

from saccade.errors import require
from saccade.serving.bench.figures import (
    cost_of,
    has_rounds,
    is_share,
    saves_bytes,
    score_text,
    shown,
    split_text,
    throughput_of,
)
from saccade.serving.bench.report_charts import short_name
from saccade.serving.bench.report_policies import can_be_drawn, policies_of

_MARKERS = {"fp32": "o", "fp16": "s", "bf16": "D", "int8": "^"}
_FRONTIER, _DOMINATED, _GRID, _INK = "#0b6e99", "#8a8f98", "#e3e6ea", "#22262b"
# From this ratio of fastest to slowest, a linear axis would squeeze the slow half together.
_LOG_FROM_RATIO = 4.0
_STARS, _STAR = "stars", "#c2571a"  # key and color of policies that are drawn
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
    axes.errorbar(
        [place], [score], yerr=[[max(0.0, score - low)], [max(0.0, high - score)]],
        xerr=[[max(0.0, place - least)], [max(0.0, most - place)]],
        fmt="*" if star else _MARKERS[variant["precision"]], ms=15 if star else 8, mew=1.6 - star,
        color=colour, mfc="white" if dominated else colour,
        ecolor=colour, elinewidth=1.0, capsize=3, zorder=3 + star,
    )  # fmt: skip


def _name_points(axes: Any, report: dict[str, Any]) -> None:
    """Label each point on the side where the label covers least."""
    axes.figure.draw_without_rendering()
    inside = axes.get_window_extent()
    # A label may rather cross a thin bar than a point; if there are many points, bars do not count,
    # unless there are the long labels of policies.
    only_points = _is_crowded(report) and not report.get(_STARS)
    boxes = (_point,) if only_points else (_bar, _point)
    taken = [box(axes, one) for one in _points(report) for box in boxes]
    # Dominated points are below the frontier: try the lower left first for their labels.
    for variant in sorted(
        _points(report), key=lambda one_variant: one_variant["dominated_by"] is not None
    ):
        dominated = variant["dominated_by"] is not None
        place = cost_of(variant), _height(variant)
        tries: list[tuple[float, int, Any, Any]] = []
        for right, up in _SIDES_OF_DOMINATED if dominated else _SIDES:
            words = axes.annotate(
                _words(variant, report), place, xytext=(9 * right, 8 * up),
                textcoords="offset points", ha="left" if right > 0 else "right",
                va="bottom" if up > 0 else "top", fontsize=9, zorder=2.5,  # never over a point
                color=_STAR if "policy" in variant else _DOMINATED if dominated else _INK,
                bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
            )  # fmt: skip
            box = words.get_window_extent()
            covered = sum(_common(box, other) for other in taken)
            outside = box.width * box.height - _common(box, inside)
            tries.append((covered + outside, len(tries), words, box))
        _, _, best, box = min(tries)
        for *_, words, _ in tries:
            if words is not best:
                words.remove()
        taken.append(box)
        if "policy" in variant:  # its label may be far away
            axes.annotate(
                "", place, xytext=best.xyann, textcoords="offset points", zorder=2.4,
                arrowprops={"arrowstyle": "-", "color": _STAR, "lw": 0.7},
            )  # fmt: skip


_SIDES = tuple((right, up) for right in (1, -1) for up in (1, -1, 3, -3, 5, -5, 8, -8))
_SIDES_OF_DOMINATED = tuple((-right, -up) for right, up in _SIDES)


def _bar(axes: Any, variant: dict[str, Any]) -> Any:
    """Return the box of an interval. Units: pixels."""
    return _box(axes, [(cost_of(variant), bound) for bound in _ends(variant)])


def _point(axes: Any, variant: dict[str, Any]) -> Any:
    """Return the box of a point. Units: pixels."""
    return _box(axes, [(cost_of(variant), _height(variant))] * 2)


def _box(axes: Any, ends: list[tuple[float, float]]) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox(axes.transData.transform(ends)).padded(6)


def _common(one: Any, other: Any) -> float:
    """Return the area that two boxes share. Units: square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _is_crowded(report: dict[str, Any]) -> bool:
    return len(report["variants"]) > _CROWDED


def _words(variant: dict[str, Any], report: dict[str, Any]) -> str:
    if "policy" in variant:
        times = f"{variant['times_full']['times']:.1f}x"
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
    axes.set_ylabel(f"{first['score']['name']} on {split_text(report['data'])}{sign}")
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
