# SPDX-License-Identifier: Apache-2.0
"""The circuit that answered for an image, drawn: modules, what they read, who hears whom."""

import io
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, require
from saccade.models.attention_maps import Drawing, ShowRequest
from saccade.models.nac.circuit import LIKELY, SampleCircuit, sample_circuit

_INK, _QUIET, _EDGE, _PAPER = "#22262b", "#5b626b", "#5f7f96", "#ffffff"
_HEAT, _WHERE = "magma", "viridis"
_ROWS = 12  # modules whose reading is shown in full


def circuit_png(
    circuit: SampleCircuit,
    *,
    image: np.ndarray | None = None,
    title: str = "",
    least: float = LIKELY,
    most: int = 64,
) -> bytes:
    """The picture as PNG bytes; of more modules than `most` the best connected ones.

    Where tokens are patches, a node is the map of what its module reads; else its colour tells
    which places it reads.
    Shapes: image [h w c] uint8; of a pair side by side.
    Raises: MissingPackage without matplotlib.
    """
    require("matplotlib", extra="bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    total = len(circuit.attention)
    shown = circuit.strongest(most)
    figure = Figure(figsize=(11.0, 6.4), dpi=130, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(1.0, 1.55))
    _draw_graph(figure.add_subplot(halves[1]), shown, least)
    if circuit.grid is None:
        _draw_reading(figure.add_subplot(halves[0]), shown)
    else:
        inner = halves[0].subgridspec(2, 1, height_ratios=(1.7, 1.0))
        _draw_image(figure.add_subplot(inner[0]), shown, image)
        _draw_maps(figure, inner[1], shown)
    figure.suptitle(title or "Circuit", x=0.01, ha="left", fontsize=13, color=_INK, weight="bold")
    figure.supxlabel(_caption(shown, total, least), x=0.01, ha="left", fontsize=8, color=_QUIET)
    buffer = io.BytesIO()
    # Without a version in it, the same circuit gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _caption(circuit: SampleCircuit, total: int, least: float) -> str:
    shown = len(circuit.attention)
    which = f"{shown} modules" if shown == total else f"{shown} best connected of {total} modules"
    if circuit.link is None:
        return f"{which}; every module hears every other, so no links are drawn"
    return f"{which}; {len(circuit.edges(least))} links of probability {least:g} and more"


def _maps(circuit: SampleCircuit) -> np.ndarray:
    assert circuit.grid is not None
    rows, columns = circuit.grid
    grids = circuit.attention.reshape(len(circuit.attention), -1, rows, columns)
    return np.concatenate(list(grids.swapaxes(0, 1)), axis=-1)


def _draw_graph(axes: Any, circuit: SampleCircuit, least: float) -> None:
    from matplotlib.collections import LineCollection

    place, edges = circuit.layout(), circuit.edges(least)
    if edges:
        ends = [place[list(edge[:2])] for edge in edges]
        # The more links, the fainter each, or a dense circuit would be one dark patch.
        strength = min(1.0, 6.0 * len(place) / len(edges))
        alphas = [
            strength * (0.12 + 0.6 * (edge[2] - least) / (1 - least + 1e-9)) for edge in edges
        ]
        axes.add_collection(
            LineCollection(ends, colors=_EDGE, alpha=alphas, linewidths=1, zorder=1)
        )
    if circuit.grid is None:
        _draw_dots(axes, circuit, place)
    else:
        _draw_thumbnails(axes, circuit, place)
    axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)


def _draw_dots(axes: Any, circuit: SampleCircuit, place: np.ndarray) -> None:
    degree = circuit.degree
    size = 50 + 250 * degree / max(degree.max(), 1e-9)
    tokens = circuit.attention.shape[1]
    where = circuit.attention @ np.arange(tokens)
    dots = axes.scatter(
        place[:, 0], place[:, 1], s=size, c=where, cmap=_WHERE, vmin=0, vmax=max(1, tokens - 1),
        edgecolors=_INK, linewidths=0.6, zorder=2,
    )  # fmt: skip
    for module in np.argsort(-degree, kind="stable")[:_ROWS]:
        axes.annotate(
            str(circuit.names[module]), place[module], color=_INK, fontsize=7, zorder=3,
            xytext=(7, 5), textcoords="offset points",
        )  # fmt: skip
    bar = axes.figure.colorbar(dots, ax=axes, shrink=0.5, pad=0.01)
    bar.set_label("mean place that a module reads", fontsize=8, color=_QUIET)
    bar.ax.tick_params(labelsize=7, colors=_QUIET)


def _draw_thumbnails(axes: Any, circuit: SampleCircuit, place: np.ndarray) -> None:
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    maps = _maps(circuit)
    side_points = max(7.0, min(26.0, 190 / np.sqrt(len(maps))))
    repeat = max(1, 48 // maps.shape[1])  # an offset image is smoothed: give it many pixels a cell
    for centre, thumbnail in zip(place, maps, strict=True):
        fine = np.kron(thumbnail / max(thumbnail.max(), 1e-12), np.ones((repeat, repeat)))
        picture = OffsetImage(fine, cmap=_HEAT, zoom=side_points / fine.shape[0])
        frame = {"edgecolor": _INK, "linewidth": 0.6, "boxstyle": "square,pad=0.02"}
        axes.add_artist(AnnotationBbox(picture, centre, pad=0, bboxprops=frame, zorder=2))


def _draw_image(axes: Any, circuit: SampleCircuit, image: np.ndarray | None) -> None:
    read = _maps(circuit).mean(0)
    if image is None:
        axes.imshow(read, cmap=_HEAT)
    else:
        height, width = image.shape[:2]
        grey = image.shape[2] == 1
        axes.imshow(image[..., 0] if grey else image, cmap="gray" if grey else None)
        # Opaque where nobody looks, so that what is read stays as it is.
        veil = np.zeros((*read.shape, 4))
        veil[..., 3] = 0.65 * (1 - read / max(read.max(), 1e-12))
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        axes.imshow(veil, extent=extent, interpolation="nearest")
        axes.set(xlim=extent[:2], ylim=extent[2:])
    axes.set(xticks=[], yticks=[])
    axes.set_title("input, dark where little is read", fontsize=9, loc="left", color=_INK)


def _draw_maps(figure: Any, place: Any, circuit: SampleCircuit) -> None:
    maps = _maps(circuit)
    best = np.argsort(-circuit.degree, kind="stable")[:_ROWS]
    columns = 6
    # A row of its own for the heading: a title over one map would be cut at the map's width.
    grid = place.subgridspec(3, columns, wspace=0.08, hspace=0.05, height_ratios=(0.12, 1, 1))
    heading = figure.add_subplot(grid[0, :])
    heading.set_axis_off()
    text = "what the best connected modules read"
    heading.text(0, 0, text, fontsize=9, color=_INK, va="bottom", transform=heading.transAxes)
    for k, module in enumerate(best):
        axes = figure.add_subplot(grid[1 + k // columns, k % columns])
        axes.imshow(maps[module], cmap=_HEAT, vmin=0)
        axes.set(xticks=[], yticks=[])
        axes.set_title(str(circuit.names[module]), fontsize=7, color=_QUIET, pad=2)


def _draw_reading(axes: Any, circuit: SampleCircuit) -> None:
    best = np.argsort(-circuit.degree, kind="stable")[:_ROWS]
    # The root of the weights: a module that reads twenty places has 0.05 for each.
    shown = np.sqrt(circuit.attention[best].T)
    axes.imshow(shown, cmap=_HEAT, vmin=0, vmax=1, aspect="auto", interpolation="none")
    axes.set_xticks(range(len(best)), [str(circuit.names[k]) for k in best], fontsize=7)
    axes.set_title("what the best connected modules read", fontsize=9, loc="left", color=_INK)
    axes.set_xlabel("module", fontsize=8, color=_QUIET)
    if circuit.words is not None:
        size = min(8.0, 380 / len(circuit.words))
        axes.set_yticks(range(len(circuit.words)), circuit.words, fontsize=size, family="monospace")
    axes.tick_params(length=0, colors=_QUIET)


def circuit(request: ShowRequest) -> Drawing:
    """Modules, what each of them reads, and who hears whom.

    Raises: SaccadeError if another model is to be drawn beside it.
    """
    view, options = request.view, request.options
    if options.against:
        raise SaccadeError(
            f"--against {options.against}: {options.model} is a NAC, whose circuit is "
            "drawn by itself. Leave the option out."
        )
    answer = request.ask(["attention", *(["link"] if "link" in view.outputs("") else [])])
    link = answer["link"][0] if "link" in answer else None
    grid = tuple(view.runtime_metadata(answer["by"])["grid"])
    drawn = sample_circuit(answer["attention"][0], link, grid=grid)
    (best,) = request.client.classify([request.image], options.budget, top=1)
    title = f"{answer['by']}: {best.labels[0][0]}"
    png = circuit_png(drawn, image=request.pixels, title=title)
    return Drawing(title, png, drawn.to_dict())
