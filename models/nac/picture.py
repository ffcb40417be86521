# SPDX-License-Identifier: Apache-2.0
"""One sample's circuit as data and as a drawing: modules, what they read, their links."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, require
from saccade.models.attention_maps import Drawing, ShowRequest

LIKELY = 0.5  # least probability of links to draw, as in the paper's figure 6
_BACKBONE = 2  # links to draw per module
_LAYERS = ((0.18, 5), (0.42, 4), (0.66, 3))  # horizontal positions, and modules per layer


@dataclass(frozen=True)
class SampleCircuit:
    """A NAC's outputs `attention` and `link` for one sample, with the names of its tokens.

    Shapes: attention [u n], rows sum to 1; link [u u], or None if every module attends to every
            other; n = sets h w if tokens are the patches of one or two images, or the number of
            words if they are symbols.
    Raises: ShapeError or SaccadeError if the parts do not fit together.
    """

    attention: np.ndarray
    link: np.ndarray | None
    grid: tuple[int, int] | None = None  # rows and columns of patches
    words: tuple[str, ...] | None = None  # the word of each token
    names: tuple[int, ...] = ()  # the modules' numbers in the model; empty: 0, 1, 2, ...

    def __post_init__(self) -> None:
        if self.attention.ndim != 2 or self.attention.size == 0:
            raise ShapeError(
                f"circuit: attention is {list(self.attention.shape)}, expected [u, n] of one "
                "sample. Select one sample of the batch."
            )
        modules, tokens = self.attention.shape
        if not self.names:
            object.__setattr__(self, "names", tuple(range(modules)))
        if self.link is not None and self.link.shape != (modules, modules):
            raise ShapeError(
                f"circuit: link is {list(self.link.shape)}, expected [{modules}, {modules}], the "
                "number of modules in attention. Take both from the same output."
            )
        if self.grid is not None and tokens not in {
            k * self.grid[0] * self.grid[1] for k in (1, 2)
        }:
            raise SaccadeError(
                f"circuit: {tokens} tokens are neither one nor two grids of {self.grid[0]} by "
                f"{self.grid[1]}. Pass the grid of the model's runtime metadata."
            )
        if self.words is not None and len(self.words) != tokens:
            raise SaccadeError(
                f"circuit: {len(self.words)} words for {tokens} tokens. Pass one per token."
            )

    @property
    def degree(self) -> np.ndarray:
        """The expected number of links to other modules.

        Shapes: -> [u]; 0 if links are dense.
        """
        if self.link is None:
            return np.zeros(len(self.attention))
        degree: np.ndarray = self.link.sum(1, dtype=np.float64) - np.diagonal(self.link)
        return degree

    def edges(self, least: float = LIKELY) -> list[tuple[int, int, float]]:
        """Return the pairs i < j linked with at least this probability, likeliest first."""
        if self.link is None:
            return []
        first, second = np.triu_indices(len(self.link), k=1)
        chances = self.link[first, second]
        order = np.argsort(-chances, kind="stable")
        order = order[chances[order] >= least]
        return [(int(first[k]), int(second[k]), float(chances[k])) for k in order]

    def strongest(self, most: int) -> "SampleCircuit":
        """Return the circuit of its best connected modules, in their original order."""
        kept = np.sort(np.argsort(-self.degree, kind="stable")[:most])
        link = None if self.link is None else self.link[np.ix_(kept, kept)]
        names = tuple(self.names[k] for k in kept)
        return SampleCircuit(self.attention[kept], link, self.grid, self.words, names)

    def backbone(self, least: float = LIKELY) -> list[tuple[int, int, float]]:
        """Return each module's likeliest links: among the likeliest of at least one end."""
        count, kept = dict.fromkeys(range(len(self.attention)), 0), []
        for first, second, chance in self.edges(least):  # likeliest first
            if min(count[first], count[second]) < _BACKBONE:
                kept.append((first, second, chance))
                count[first] += 1
                count[second] += 1
        return kept

    def layers(self) -> np.ndarray:
        """Place at most twelve modules in layers from left to right, the best linked last.

        Shapes: -> [u 2], within 0 to 1.
        """
        order = iter(np.argsort(self.degree, kind="stable"))
        place = np.zeros((len(self.attention), 2))
        left = len(place)
        for across, size in _LAYERS:
            column = [next(order) for _ in range(min(size, left))]
            left -= len(column)
            for row, module in enumerate(column):
                place[module] = across, 1 - (row + 0.5) / len(column)
        return place

    def to_dict(self, *, least: float = LIKELY, tokens: int = 3) -> dict[str, Any]:
        """Return JSON: the modules with the tokens that they read most, and the likely links."""
        degree = self.degree
        nodes = []
        for module, row in enumerate(self.attention):
            top = np.argsort(-row, kind="stable")[:tokens]
            reads = [{"token": int(k), "weight": float(row[k])} for k in top]
            for read, k in zip(reads, top, strict=True):
                read |= {"word": self.words[k]} if self.words else {}
            name = self.names[module]
            nodes.append({"module": name, "degree": float(degree[module]), "reads": reads})
        links = [
            {"a": self.names[a], "b": self.names[b], "probability": chance}
            for a, b, chance in self.edges(least)
        ]
        return {"nodes": nodes, "links": links, "least": least}


def sample_circuit(
    attention: np.ndarray,
    link: np.ndarray | None,
    *,
    length: int | None = None,
    grid: tuple[int, int] | None = None,
    words: tuple[str, ...] | None = None,
) -> SampleCircuit:
    """Return one sample's circuit, without tokens beyond its length.

    Shapes: attention [u n], link [u u].
    """
    kept = attention if length is None else attention[:, :length]
    return SampleCircuit(kept, link, grid, words if words is None else words[: kept.shape[1]])


_INK, _QUIET, _EDGE, _PAPER = "#22262b", "#5b626b", "#5f7f96", "#ffffff"
_IN, _OUT = "#d55e00", "#0b6e99"
_HEAT, _WHERE = "magma", "viridis"
_ROWS = 12  # modules to draw
_ANSWER = 0.96, 0.5


def circuit_png(
    circuit: SampleCircuit,
    *,
    image: np.ndarray | None = None,
    title: str = "",
    answer: str = "",
    least: float = LIKELY,
    most: int = _ROWS,
) -> bytes:
    """Return the drawing as PNG bytes: the input, the best linked modules, and the answer.

    Modules are placed in layers, those with the most links nearest to the answer, each with its
    likeliest links to the others. If tokens are patches, a module is drawn as the map of what it
    reads, with an arrow from the patch that it reads most; else its color shows what it reads.
    Shapes: image [h w c] uint8; a pair is side by side.
    Raises: MissingPackage if matplotlib is not installed.
    """
    require("matplotlib", extra="bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = circuit.strongest(min(most, _ROWS))
    figure = Figure(figsize=(11.0, 5.6), dpi=130, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(1, 2, width_ratios=(1.0, 1.7))
    read, graph = figure.add_subplot(halves[0]), figure.add_subplot(halves[1])
    place = drawn.layers()
    _draw_graph(graph, drawn, place, answer, least)
    if circuit.grid is None:
        _draw_reading(read, drawn)
    else:
        _draw_image(read, drawn, image)
        _draw_arrows(figure, read, graph, drawn, place, image)
    figure.suptitle(title or "Circuit", x=0.01, ha="left", fontsize=13, color=_INK, weight="bold")
    figure.supxlabel(_caption(circuit, drawn, least), x=0.01, ha="left", fontsize=8, color=_QUIET)
    buffer = io.BytesIO()
    # Without the version in the file, the same circuit gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _caption(whole: SampleCircuit, part: SampleCircuit, least: float) -> str:
    total, count = len(whole.attention), len(part.attention)
    which = f"{count} modules" if count == total else f"the {count} best linked of {total} modules"
    drawn = f"Drawn: {which}, from left to right by their number of links"
    read_out = "The read-out reads every module."
    if whole.link is None:
        return f"{drawn}. Every module reads every other, so no links are drawn. {read_out}"
    every, links = len(whole.edges(least)), len(part.backbone(least))
    return f"{drawn}, and {links} of {every:,} links of probability {least:g} and more. {read_out}"


def _maps(circuit: SampleCircuit) -> np.ndarray:
    assert circuit.grid is not None
    rows, columns = circuit.grid
    grids = circuit.attention.reshape(len(circuit.attention), -1, rows, columns)
    return np.concatenate(list(grids.swapaxes(0, 1)), axis=-1)


def _draw_graph(
    axes: Any, circuit: SampleCircuit, place: np.ndarray, answer: str, least: float
) -> None:
    from matplotlib.collections import LineCollection

    edges = circuit.backbone(least)
    if edges:
        ends = [place[list(edge[:2])] for edge in edges]
        alphas = [0.35 + 0.6 * (edge[2] - least) / (1 - least + 1e-9) for edge in edges]
        axes.add_collection(
            LineCollection(ends, colors=_EDGE, alpha=alphas, linewidths=1.4, zorder=1)
        )
    degree = circuit.degree / max(circuit.degree.max(), 1e-9)
    for position, strength in zip(place, degree, strict=True):
        arrow = {"arrowstyle": "->", "color": _OUT, "alpha": 0.25 + 0.6 * strength, "lw": 1.2}
        axes.annotate("", _ANSWER, position, arrowprops={**arrow, "shrinkA": 16, "shrinkB": 22})
    axes.annotate(
        answer or "answer", _ANSWER, ha="center", va="center", fontsize=10, color=_INK, zorder=4,
        weight="bold", bbox={"boxstyle": "round,pad=0.4", "fc": _PAPER, "ec": _OUT, "lw": 1.5},
    )  # fmt: skip
    if circuit.grid is None:
        _draw_dots(axes, circuit, place)
    else:
        _draw_thumbnails(axes, circuit, place)
    axes.set(xlim=(0.02, 1.06), ylim=(-0.06, 1.04), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title("modules", fontsize=9, loc="left", color=_INK)


def _draw_arrows(
    figure: Any, read: Any, graph: Any, circuit: SampleCircuit, place: np.ndarray,
    image: np.ndarray | None,
) -> None:  # fmt: skip
    """Draw arrows from the patch that a module reads most to the module."""
    from matplotlib.patches import ConnectionPatch

    maps = _maps(circuit)
    height, width = maps[0].shape if image is None else image.shape[:2]
    for attention, end in zip(maps, place, strict=True):
        row, column = np.unravel_index(attention.argmax(), attention.shape)
        start = ((column + 0.5) * width / attention.shape[1] - 0.5,
                 (row + 0.5) * height / attention.shape[0] - 0.5)  # fmt: skip
        figure.add_artist(
            ConnectionPatch(
                start,
                end,
                "data",
                "data",
                axesA=read,
                axesB=graph,
                arrowstyle="->",
                color=_IN,
                alpha=0.7,
                lw=1.1,
                shrinkB=16,
                mutation_scale=9,
            )
        )


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
    side_points = 30.0
    repeat = max(1, 48 // maps.shape[1])  # offset images are smoothed: many pixels per cell
    for centre, thumbnail in zip(place, maps, strict=True):
        fine = np.kron(thumbnail / max(thumbnail.max(), 1e-12), np.ones((repeat, repeat)))
        picture = OffsetImage(fine, cmap=_HEAT, zoom=side_points / fine.shape[0])
        frame = {"edgecolor": _INK, "linewidth": 0.6, "boxstyle": "square,pad=0.02"}
        axes.add_artist(AnnotationBbox(picture, centre, pad=0, bboxprops=frame, zorder=3))
    for name, centre in zip(circuit.names, place, strict=True):
        axes.annotate(
            str(name), centre, xytext=(0, 0.6 * side_points), textcoords="offset points",
            ha="center", fontsize=7, color=_QUIET, zorder=4,
        )  # fmt: skip


def _draw_image(axes: Any, circuit: SampleCircuit, image: np.ndarray | None) -> None:
    read = _maps(circuit).mean(0)
    if image is None:
        axes.imshow(read, cmap=_HEAT)
    else:
        height, width = image.shape[:2]
        grey = image.shape[2] == 1
        axes.imshow(image[..., 0] if grey else image, cmap="gray" if grey else None)
        # Opaque where no module reads, so that the rest keeps its colors.
        veil = np.zeros((*read.shape, 4))
        veil[..., 3] = 0.65 * (1 - read / max(read.max(), 1e-12))
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        axes.imshow(veil, extent=extent, interpolation="nearest")
        axes.set(xlim=extent[:2], ylim=extent[2:])
    axes.set(xticks=[], yticks=[])
    axes.set_title("input, dark where little is read", fontsize=9, loc="left", color=_INK)


def _draw_reading(axes: Any, circuit: SampleCircuit) -> None:
    best = np.argsort(-circuit.degree, kind="stable")[:_ROWS]
    # The root of the weights: a module that reads twenty tokens has 0.05 for each.
    shares = np.sqrt(circuit.attention[best].T)
    axes.imshow(shares, cmap=_HEAT, vmin=0, vmax=1, aspect="auto", interpolation="none")
    axes.set_xticks(range(len(best)), [str(circuit.names[k]) for k in best], fontsize=7)
    axes.set_title("what the best connected modules read", fontsize=9, loc="left", color=_INK)
    axes.set_xlabel("module", fontsize=8, color=_QUIET)
    if circuit.words is not None:
        size = min(8.0, 380 / len(circuit.words))
        axes.set_yticks(range(len(circuit.words)), circuit.words, fontsize=size, family="monospace")
    axes.tick_params(length=0, colors=_QUIET)


def circuit(request: ShowRequest) -> Drawing:
    """Draw modules, what each of them reads, and their links.

    Raises: SaccadeError if it is to be drawn next to another model.
    """
    view, options = request.view, request.options
    if options.against:
        raise SaccadeError(
            f"--against {options.against}: {options.model} is a NAC, whose circuit is drawn "
            "alone. Leave the option out."
        )
    answer = request.ask(["attention", *(["link"] if "link" in view.outputs("") else [])])
    link = answer["link"][0] if "link" in answer else None
    grid = tuple(view.runtime_metadata(answer["by"])["grid"])
    drawn = sample_circuit(answer["attention"][0], link, grid=grid)
    (best,) = request.client.classify([request.image], options.budget, top=1)
    title = f"{answer['by']}: {best.labels[0][0]}"
    png = circuit_png(drawn, image=request.pixels, title=title, answer=best.labels[0][0])
    return Drawing(title, png, drawn.to_dict())


def focus(
    metadata: Mapping[str, Any], outputs: Mapping[str, np.ndarray], size: tuple[int, int]
) -> np.ndarray | None:
    """Return the mean map of what the modules read.

    Shapes: outputs["attention"] [n modules tokens] -> [n h w], or None without it or a grid.
    """
    weights, grid = outputs.get("attention"), metadata.get("grid")
    if weights is None or grid is None:
        return None
    read = weights.mean(1).reshape(len(weights), -1, *grid)
    return np.concatenate(list(read.swapaxes(0, 1)), axis=-1)
