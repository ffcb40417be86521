# SPDX-License-Identifier: Apache-2.0
"""Attention maps over an image, one row per model; zero weights are gray and crossed out."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.core.errors import require
from saccade.models.attention_maps import MapRow, Panel

_INK, _QUIET, _PAPER = "#22262b", "#5b626b", "#ffffff"
_COLUMNS = 8
_TITLE_INCH = 0.105  # width of a wide character of a title
_GREY = (0.299, 0.587, 0.114)


def maps_png(rows: Sequence[MapRow], pixels: np.ndarray) -> bytes:
    """Draw each model's title, the image, and its maps; return PNG bytes.

    Shapes: pixels uint8 [h w 3].
    Raises: MissingPackage without matplotlib.
    """
    matplotlib = require("matplotlib", extra="bench")
    buffer = io.BytesIO()
    # Labels are plain text: matplotlib would read text between two dollar signs as a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        # Leave out the version, so that the same maps give the same bytes.
        _figure(rows, pixels).savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _figure(rows: Sequence[MapRow], pixels: np.ndarray) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, 1 + max(len(row.panels) for row in rows))
    lines = [-(-(1 + len(row.panels)) // columns) for row in rows]
    width = 1.9 * columns + 0.3
    titles = [_wrapped(row.title, width) for row in rows]
    heads = sum(0.2 * (1 + title.count("\n")) + 0.2 for title in titles)
    size = (width, 2.3 * sum(lines) + heads)
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(rows), 1, height_ratios=lines, squeeze=False).ravel()
    for part, row, title, count in zip(parts, rows, titles, lines, strict=True):
        part.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK, fontweight="bold")
        axes = np.atleast_1d(part.subplots(count, columns, squeeze=False)).ravel()
        for axis in axes:
            axis.set_axis_off()
        _draw_image(axes[0], pixels, "the image")
        for place, panel in zip(axes[1:], row.panels, strict=False):
            _draw(place, panel, pixels)
    return figure


def _wrapped(title: str, width: float) -> str:
    """Wrap the title to fit: the answer is at its end and must not be cut off."""
    return "\n".join(textwrap.wrap(title, max(20, int(width / _TITLE_INCH)))) or title


def _draw(axes: Any, panel: Panel, pixels: np.ndarray) -> None:
    if panel.pixels is not None or panel.weights is None:
        _draw_image(axes, pixels if panel.pixels is None else panel.pixels, panel.title)
        return
    height, width = pixels.shape[:2]
    extent = (0, width, height, 0)
    grey = pixels @ np.array(_GREY) / 255
    axes.imshow(0.55 + 0.45 * grey, cmap="gray", vmin=0, vmax=1, extent=extent)
    weights = panel.weights.astype(np.float64)
    shown = np.ma.masked_where(weights == 0, weights)
    most = max(float(weights.max()), 1e-12) if panel.most is None else panel.most
    strength = np.where(weights == 0, 0, 0.25 + 0.65 * np.clip(weights / most, 0, 1))
    axes.imshow(shown, cmap="inferno", vmin=0, vmax=most, extent=extent, alpha=strength)
    rows, columns = weights.shape
    down, right = np.nonzero(weights == 0)
    if 0 < len(down) <= 400:
        places = ((right + 0.5) * width / columns, (down + 0.5) * height / rows)
        axes.scatter(*places, marker="x", s=9, linewidths=0.6, color=_QUIET)
    axes.set_title(panel.title, fontsize=8, color=_INK)


def _draw_image(axes: Any, pixels: np.ndarray, title: str) -> None:
    grey = pixels.shape[2] == 1
    axes.imshow(pixels[:, :, 0] if grey else pixels, cmap="gray" if grey else None)
    axes.set_title(title, fontsize=8, color=_INK)
