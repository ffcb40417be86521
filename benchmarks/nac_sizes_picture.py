# SPDX-License-Identifier: Apache-2.0
"""Draw results/nac_sizes.json: the loss by size, and the modules dropped at 3 points."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_ORDERS = {"degree": "#0b6e99", "random": "#c2571a", "reversed": "#7b4fa3"}
_SIZES = {32: "#8fb8c9", 64: "#3d8a4e", 128: "#c2571a", 256: "#7b4fa3"}
_GREY = "#5b626b"


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw scores by share dropped (left), and the share dropped at 3 points by size (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    _draw_curves(left, result)
    _draw_sizes(right, result)
    for axes in (left, right):
        axes.grid(color="#e3e6ea", lw=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    seeds = sorted({len(arm["seeds"]) for arm in result["arms"].values()})
    spoken = " or ".join(map(str, seeds))
    figure.supxlabel(
        f"digits-sum, no module dropout in training, {result['steps']:,} steps of "
        f"{result['batch']}; {spoken} seed{'s' if seeds[-1] > 1 else ''}, a thin line or a dot "
        "each. Random: mean of 2 orders.",
        x=0.01, ha="left", fontsize=7.5, color=_GREY,
    )  # fmt: skip
    figure.savefig(out, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_curves(axes: Any, result: dict[str, Any]) -> None:
    for name, arm_runs in sorted(result["arms"].items(), key=lambda arm: arm[1]["modules"]):
        if not (arm_runs["auxiliary_heads"] and arm_runs["learned"]):
            continue
        modules = arm_runs["modules"]
        for index, run in enumerate(result["runs"][name]):
            kept = sorted(map(int, run["degree"]))
            dropped = [100 * (1 - each / modules) for each in kept]
            lost = [100 * (run["degree"][str(each)] - arm_runs["full"][index]) for each in kept]
            label = name if index == 0 else None
            axes.plot(dropped, lost, color=_SIZES[modules], lw=1.5, marker="o", ms=2, label=label)
    axes.axhline(-result["lost_points"], color="#8a8f98", lw=0.8)
    axes.set_title("least connected modules dropped first", fontsize=10)
    axes.set_xlabel("modules dropped, %")
    axes.set_ylabel("top-1 minus that of all modules, points")
    axes.legend(fontsize=8, frameon=False, loc="lower left")


def _draw_sizes(axes: Any, result: dict[str, Any]) -> None:
    for heads, style in ((True, "-"), (False, "--")):
        arms = sorted(
            (
                arm_runs
                for arm_runs in result["arms"].values()
                if arm_runs["auxiliary_heads"] == heads and arm_runs["learned"]
            ),
            key=lambda arm_runs: arm_runs["modules"],
        )
        if not arms:
            continue
        for order, colour in _ORDERS.items():
            shares = [arm_runs["dropped_at_3_points"][order] for arm_runs in arms]
            sizes = [arm_runs["modules"] for arm_runs in arms]
            means = [100 * sum(share) / len(share) for share in shares]
            label = f"{order} order" + ("" if heads else ", no auxiliary heads")
            if heads or order == "degree":
                axes.plot(sizes, means, style, color=colour, lw=1.6, label=label)
                for size, each in zip(sizes, shares, strict=True):
                    axes.plot([size] * len(each), [100 * x for x in each], "o", color=colour, ms=4)
    paper = result["paper"]
    axes.plot(
        [paper["modules"]], [100 * paper["dropped"]], "*", color=_GREY, ms=12,
        label="the paper, Tiny-ImageNet, fig. 5",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted(
        {arm_runs["modules"] for arm_runs in result["arms"].values()} | {paper["modules"]}
    )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-3, 100)
    axes.set_xlabel("modules of the circuit")
    axes.set_ylabel(f"modules dropped at {result['lost_points']:g} points, %")
    axes.legend(fontsize=8, frameon=False)
