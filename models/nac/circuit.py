# SPDX-License-Identifier: Apache-2.0
"""One sample's circuit as data: modules and what they read, links and their probabilities."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError

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
