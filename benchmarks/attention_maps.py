# SPDX-License-Identifier: Apache-2.0
"""Draw the image in docs/ops.md: one map of scores under softmax, sparsemax and TVMax."""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from scipy.special import softmax

from saccade.plugins.ops import sparsemax, tvmax

LAM = 0.1


def scores() -> np.ndarray:
    """Return logits of two objects on a 14 x 14 grid with noise, like a noisy attention head."""
    y, x = np.mgrid[:14, :14]
    first = np.exp(-((y - 4.0) ** 2 + (x - 4.5) ** 2) / 5.0)
    second = np.exp(-((y - 9.5) ** 2 / 3.0 + (x - 9.5) ** 2 / 7.0))
    noise = 0.06 * np.random.default_rng(7).standard_normal((14, 14))
    return 0.35 * np.maximum(first, 0.8 * second) + noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parent.parent / "docs" / "attention_maps.png"
    parser.add_argument("--out", type=Path, default=default)
    out = parser.parse_args().out
    z = scores()
    maps = {
        "scores": z,
        "softmax": softmax(z),
        "sparsemax": sparsemax(z.reshape(-1)).reshape(z.shape),
        f"TVMax, lam {LAM:g}": tvmax(z, lam=LAM),
    }
    figure, panels = plt.subplots(1, len(maps), figsize=(13, 3.6), layout="constrained")
    for panel, (name, values) in zip(panels, maps.items(), strict=True):
        draw(panel, name, values)
    figure.savefig(out, dpi=110, metadata={"Software": None})


def draw(panel: plt.Axes, name: str, values: np.ndarray) -> None:
    is_weight = name != "scores"
    image = panel.imshow(values, cmap="viridis", vmin=0 if is_weight else None)
    panel.figure.colorbar(image, ax=panel, shrink=0.75)
    panel.set_xticks([])
    panel.set_yticks([])
    if not is_weight:
        panel.set_title("scores (logits)", fontsize=10)
        return
    for row, column in np.argwhere(values == 0):
        # Cells of exactly zero are hatched, because a dark color alone could be a small weight.
        corner = (column - 0.5, row - 0.5)
        panel.add_patch(
            Rectangle(corner, 1, 1, facecolor="none", edgecolor="white", hatch="//", linewidth=0)
        )
    levels = len(np.unique(np.round(values[values > 0], 9)))
    zeros = 100 * (values == 0).mean()
    panel.set_title(f"{name}\n{zeros:.0f} % exactly zero,\n{levels} levels above it", fontsize=10)


if __name__ == "__main__":
    main()
