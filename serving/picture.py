# SPDX-License-Identifier: Apache-2.0
"""The frontier as a picture: score against throughput, from the report's figures alone."""

import io
from typing import Any

from saccade.plugins.errors import require

_FRONTIER, _DOMINATED, _GRID, _INK = "#0b6e99", "#8a8f98", "#e3e6ea", "#22262b"
# From this ratio of fastest to slowest on, a linear axis would squeeze the slow half together.
_LOG_FROM_RATIO = 4.0


def throughput_of(variant: dict[str, Any]) -> tuple[float, str]:
    """The throughput that places a variant on the picture, and where it was measured.

    Units: inferences per second.
    """
    if variant["grpc"]:
        name = max(
            (name for name in variant["grpc"] if name.startswith("concurrency_")),
            key=lambda name: int(name.rpartition("_")[2]),
        )
        where = f"through gRPC, concurrency {name.rpartition('_')[2]}"
        return variant["grpc"][name]["inferences_per_second"], where
    best = variant["in_process"]["best_batch"]
    return variant["in_process"][f"batch_{best}"]["inferences_per_second"], "in process, best batch"


def frontier_png(report: dict[str, Any]) -> bytes:
    """The picture as PNG bytes.

    Raises: MissingPackage without matplotlib.
    """
    require("matplotlib", extra="bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_frontier(axes, report["variants"])
    for variant in report["variants"]:
        _draw_point(axes, variant)
    _dress(axes, report)
    figure.suptitle(
        f"{report['model']} on {report['data']['name']}: score against throughput",
        x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.supxlabel(_caption(report), x=0.01, ha="left", fontsize=7.5, color="#5b626b")
    _name_points(axes, report)
    buffer = io.BytesIO()
    # Without a date and a version in it, the same figures give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_frontier(axes: Any, variants: list[dict[str, Any]]) -> None:
    kept = sorted(
        (throughput_of(variant)[0], 100 * variant["score"]["value"])
        for variant in variants
        if variant["dominated_by"] is None
    )
    if not kept:
        return
    # A staircase: who wants a speed between two points gets the best score at least that fast.
    speeds = [speed for speed, _ in kept]
    best = [max(score for _, score in kept[index:]) for index in range(len(kept))]
    axes.step(speeds, best, where="pre", color=_FRONTIER, lw=2.2, alpha=0.35, zorder=2)


def _draw_point(axes: Any, variant: dict[str, Any]) -> None:
    speed = throughput_of(variant)[0]
    score = 100 * variant["score"]["value"]
    low, high = (100 * bound for bound in variant["score"]["interval"])
    dominated = variant["dominated_by"] is not None
    colour = _DOMINATED if dominated else _FRONTIER
    axes.errorbar(
        [speed], [score], yerr=[[max(0.0, score - low)], [max(0.0, high - score)]],
        fmt="o", ms=8, mew=1.6, color=colour, mfc="white" if dominated else colour,
        ecolor=colour, elinewidth=1.0, capsize=3, zorder=3,
    )  # fmt: skip


def _name_points(axes: Any, report: dict[str, Any]) -> None:
    """Words beside each point, on the side where they cover least."""
    axes.figure.draw_without_rendering()
    inside = axes.get_window_extent()
    taken = [_bar(axes, variant) for variant in report["variants"]]
    # Dominated points lie under the frontier: their words look for room to the lower left first.
    for variant in sorted(report["variants"], key=lambda each: each["dominated_by"] is not None):
        dominated = variant["dominated_by"] is not None
        place = throughput_of(variant)[0], 100 * variant["score"]["value"]
        tries: list[tuple[float, int, Any, Any]] = []
        for right, up in _SIDES[::-1] if dominated else _SIDES:
            words = axes.annotate(
                _words(variant, report["model"]), place, xytext=(9 * right, 8 * up),
                textcoords="offset points", ha="left" if right > 0 else "right",
                va="bottom" if up > 0 else "top", fontsize=9, zorder=4,
                color=_DOMINATED if dominated else _INK,
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


_SIDES = ((1, 1), (1, -1), (1, 3), (1, -3), (-1, 1), (-1, 3), (-1, -3), (-1, -1))


def _bar(axes: Any, variant: dict[str, Any]) -> Any:
    """The box, in pixels, that a point and its interval take."""
    speed = throughput_of(variant)[0]
    ends = [(speed, 100 * bound) for bound in variant["score"]["interval"]]
    from matplotlib.transforms import Bbox

    return Bbox(axes.transData.transform(ends)).padded(6)


def _common(one: Any, other: Any) -> float:
    """Area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _words(variant: dict[str, Any], model: str) -> str:
    name = f"budget {variant['budget']:g} · {100 * variant['score']['value']:.2f} %"
    if variant["precision"] != "fp32":
        name = f"{variant['precision']}, {name}"
    if variant["dominated_by"] is None:
        return name
    return f"{name}\ndominated by {variant['dominated_by'].removeprefix(model + '-')}"


def _dress(axes: Any, report: dict[str, Any]) -> None:
    speeds = [throughput_of(variant)[0] for variant in report["variants"]]
    low, high = min(speeds), max(speeds)
    left, right = 0.12, 0.4  # room for the words beside the fastest point
    if high / low >= _LOG_FROM_RATIO:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(low / (high / low) ** left, high * (high / low) ** right)
    else:
        span = high - low or high
        axes.set_xlim(low - left * span, high + right * span)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel(f"inferences per second, {throughput_of(report['variants'][0])[1]}")
    axes.set_ylabel("top-1 on the test split, %")
    axes.margins(y=0.12)
    axes.grid(True, color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"{machine['runtime']}, 1 thread, on {machine['device']}. {report['data']['n']} test "
        "images, bars are 95 % Wilson intervals.\nHollow: dominated, that is, another variant is "
        "as fast and better beyond the paired 95 % interval of the difference."
    )
