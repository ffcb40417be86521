# SPDX-License-Identifier: Apache-2.0
"""Draw results/nac_priors.json: score and throughput against the modules kept."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLOURS = {
    "scale-free": "#0b6e99",
    "planted-partition": "#c2571a",
    "ring-of-cliques": "#3d8a4e",
    "erdos-renyi": "#7b4fa3",
    "dense": "#5b626b",
}


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw scores with their spread (left), and throughput relative to the full model (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    for arm, arm_runs in result["arms"].items():
        _draw_scores(left, arm, arm_runs)
        if arm in result["throughput"]["arms"]:
            _draw_times(right, arm, result["throughput"]["arms"][arm])
    left.set_ylabel("top-1 on the test split, %")
    right.set_ylabel("throughput, times the full model's")
    right.axhline(1, color="#8a8f98", lw=0.8)
    for axes in (left, right):
        axes.set_xlabel(f"modules kept of {result['modules']}")
        axes.invert_xaxis()
        axes.grid(color="#e3e6ea", lw=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.legend(fontsize=8, frameon=False, title="share dropped at 3 points", title_fontsize=8)
    seeds = {arm: len(arm_runs["seeds"]) for arm, arm_runs in result["arms"].items()}
    fewest, most = min(seeds.values()), max(seeds.values())
    spoken = f"{most}" if fewest == most else f"{fewest} to {most}"
    timed = result["throughput"]
    figure.supxlabel(
        f"digits-sum, trained without module dropout; mean and spread of {spoken} seed"
        f"{'s' if most > 1 else ''}. NAC: least connected modules first; dense: mean of 5 random "
        f"orders.\nThroughput: folded torch model, batch {timed['batch']}, one thread, "
        f"by CPU time, interleaved rounds, on {result['machine']['device']}.",
        x=0.01, ha="left", fontsize=7.5, color="#5b626b",
    )  # fmt: skip
    figure.savefig(out, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_scores(axes: Any, arm: str, curve: dict[str, Any]) -> None:
    kept = sorted(map(int, curve["mean"]))
    share = curve["dropped_at_3_points"]
    words = f"{arm}: {100 * share:.0f} %" if share is not None else arm
    style = "--" if arm == "dense" else "-"
    values = [100 * curve["mean"][str(each)] for each in kept]
    axes.plot(kept, values, style, color=_COLOURS[arm], lw=1.8, marker="o", ms=3, label=words)
    axes.fill_between(
        kept,
        [100 * curve["least"][str(each)] for each in kept],
        [100 * curve["most"][str(each)] for each in kept],
        color=_COLOURS[arm], alpha=0.12, lw=0,
    )  # fmt: skip


def _draw_times(axes: Any, arm: str, timed: dict[str, Any]) -> None:
    kept = sorted(map(int, timed))
    style = "--" if arm == "dense" else "-"
    values = [timed[str(each)]["times_full"] for each in kept]
    axes.plot(kept, values, style, color=_COLOURS[arm], lw=1.8, marker="o", ms=3, label=arm)
