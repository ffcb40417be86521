# SPDX-License-Identifier: Apache-2.0
"""Draw results/policies.json: where images stop, and policies beside fixed budgets."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_FIXED, _STAR, _PALE, _GREY, _INK = "#0b6e99", "#c2571a", "#dfe8ec", "#5b626b", "#22262b"
_SHOWN_RISK = 0.02
_CLOSE = 1.12  # ratio of throughputs below which the label of the second point is raised


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw one policy's steps (left), and score against throughput (right)."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11.5, 4.9), layout="constrained", width_ratios=(1, 1.35)
    )
    policies = result["policies"]
    _draw_steps(left, min(policies, key=lambda one: abs(one["risk"] - _SHOWN_RISK)), result)
    _draw_points(right, result)
    machine, n = result["machine"], policies[0]["score"]["n"]
    busy = machine["load_average"] > 0.5 * machine["cores"]
    noise = "; the machine was busy, so only ratios are shown" * busy
    figure.supxlabel(
        f"digits-sum, circuit {result['checkpoint']}; {n:,} test images, none of which took part "
        f"in the calibration. Bars: 95 % intervals.\n{machine['runtime']}, in process, one thread, "
        f"on {machine['device']}, {result['options']['rounds']} rounds in turn{noise}.",
        x=0.01, ha="left", fontsize=7.5, color=_GREY,
    )  # fmt: skip
    figure.savefig(out, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_steps(axes: Any, policy: dict[str, Any], result: dict[str, Any]) -> None:
    budgets = {one["variant"]: one["budget"] for one in result["budgets"]}
    left = 100.0
    for row, step in enumerate(policy["steps"]):
        stops = 100 * step["share"]
        goes_on = left - stops if row + 1 < len(policy["steps"]) else 0
        axes.barh(row, stops, height=0.5, color=_STAR)
        axes.barh(row, goes_on, left=stops, height=0.5, color=_PALE)
        text = f"{stops:.0f} answered here" + (f", {goes_on:.0f} go on" if goes_on else "")
        axes.text(0, row - 0.31, text, va="bottom", fontsize=9.5, color=_INK)
        left -= stops
    rows = range(len(policy["steps"]))
    axes.set_yticks(rows, [f"budget {budgets[step['variant']]:g}" for step in policy["steps"]])
    axes.set_ylim(len(policy["steps"]) - 0.6, -0.75)
    axes.set_xlim(0, 103)
    axes.set_xlabel("of 100 images")
    axes.tick_params(left=False)
    axes.set_title(
        f"The policy of risk {100 * policy['risk']:g} %: easy images stop early",
        fontsize=10.5, loc="left", color=_INK,
    )  # fmt: skip
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_points(axes: Any, result: dict[str, Any]) -> None:
    budgets, policies = result["budgets"], result["policies"]
    axes.plot(
        [one["times_full"]["times"] for one in budgets], [_score(one) for one in budgets],
        color=_FIXED, lw=2, alpha=0.35, zorder=1,
    )  # fmt: skip
    _draw_marks(axes, budgets, "o", 7, _FIXED, "a fixed budget")
    _draw_marks(axes, policies, "*", 15, _STAR, "a policy, by its certified risk in %")
    for one in budgets:
        axes.annotate(
            f"{one['budget']:.3g}", (one["times_full"]["times"], _score(one)), xytext=(-7, -6),
            textcoords="offset points", ha="right", va="top", fontsize=9, color=_FIXED,
        )  # fmt: skip
    raised, before = 0, 0.0
    for one in sorted(policies, key=lambda one: one["times_full"]["times"]):
        times = one["times_full"]["times"]
        raised = raised + 1 if times < _CLOSE * before else 0
        before = times
        axes.annotate(
            f"{100 * one['risk']:g}", (times, _score(one)), xytext=(0, 17 + 13 * raised),
            textcoords="offset points", ha="center", va="bottom", fontsize=9.5, color=_STAR,
            fontweight="bold",
        )  # fmt: skip
    axes.margins(y=0.14)
    axes.set_xscale("log")
    ticks = [
        tick
        for tick in (0.5, 1, 2, 5, 10, 20, 50)
        if tick <= 1.5 * max(one["times_full"]["times"] for one in budgets)
    ]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("throughput, as a multiple of the full model's")
    axes.set_ylabel("correct answers, %")
    axes.set_title("Policies beside fixed budgets", fontsize=10.5, loc="left", color=_INK)
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    axes.grid(color="#e3e6ea", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_marks(
    axes: Any, points: list[dict[str, Any]], marker: str, size: int, colour: str, label: str
) -> None:
    for index, one in enumerate(points):
        times, (low, high) = one["times_full"]["times"], one["times_full"]["interval"]
        score, (least, most) = _score(one), (100 * bound for bound in one["score"]["interval"])
        axes.errorbar(
            [times], [score], xerr=[[times - low], [high - times]],
            yerr=[[score - least], [most - score]], fmt=marker, ms=size, color=colour,
            elinewidth=0.9, label=label if index == 0 else None, zorder=3,
        )  # fmt: skip


def _score(one: dict[str, Any]) -> float:
    return 100 * float(one["score"]["value"])
