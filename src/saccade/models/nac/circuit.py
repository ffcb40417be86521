# SPDX-License-Identifier: Apache-2.0
"""One sample's circuit as data: modules with what they read, links with their probabilities."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, ShapeError

LIKELY = 0.5  # a link of at least this probability is drawn, as in the paper's figure 6
_ROUNDS = 200  # of the layout


@dataclass(frozen=True)
class SampleCircuit:
    """Answer of a NAC for one sample under `attention` and `link`, and names of its tokens.

    Shapes: attention [u n], rows sum to 1; link [u u], or none where every module hears every
            other; n = sets h w where tokens are the patches of one or two images, or the number
            of words where they are symbols.
    Raises: ShapeError or SaccadeError if the parts do not belong together.
    """

    attention: np.ndarray
    link: np.ndarray | None
    grid: tuple[int, int] | None = None  # rows and columns of patches
    words: tuple[str, ...] | None = None  # what stands at each token
    names: tuple[int, ...] = ()  # the modules' numbers in the model; none: from 0 on

    def __post_init__(self) -> None:
        if self.attention.ndim != 2 or self.attention.size == 0:
            raise ShapeError(
                f"circuit: attention is {list(self.attention.shape)}, expected [u, n] of one "
                "sample. Pick a sample of the batch."
            )
        modules, tokens = self.attention.shape
        if not self.names:
            object.__setattr__(self, "names", tuple(range(modules)))
        if self.link is not None and self.link.shape != (modules, modules):
            raise ShapeError(
                f"circuit: link is {list(self.link.shape)}, expected [{modules}, {modules}] as "
                "the attention has that many modules. Take both from one answer."
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
                f"circuit: {len(self.words)} words for {tokens} tokens. Give one a token."
            )

    @property
    def degree(self) -> np.ndarray:
        """Expected number of links to other modules.

        Shapes: -> [u]; 0 where links are dense.
        """
        if self.link is None:
            return np.zeros(len(self.attention))
        degree: np.ndarray = self.link.sum(1, dtype=np.float64) - np.diagonal(self.link)
        return degree

    def edges(self, least: float = LIKELY) -> list[tuple[int, int, float]]:
        """Pairs i < j of modules linked with at least this probability, likeliest first."""
        if self.link is None:
            return []
        first, second = np.triu_indices(len(self.link), k=1)
        chances = self.link[first, second]
        order = np.argsort(-chances, kind="stable")
        order = order[chances[order] >= least]
        return [(int(first[k]), int(second[k]), float(chances[k])) for k in order]

    def strongest(self, most: int) -> "SampleCircuit":
        """The circuit of its best connected modules, in their own order."""
        kept = np.sort(np.argsort(-self.degree, kind="stable")[:most])
        link = None if self.link is None else self.link[np.ix_(kept, kept)]
        names = tuple(self.names[k] for k in kept)
        return SampleCircuit(self.attention[kept], link, self.grid, self.words, names)

    def layout(self, seed: int = 0) -> np.ndarray:
        """Places on the plane: linked modules pull each other together, all push each other away.

        Shapes: -> [u 2], within -1 to 1.
        Source: Fruchterman and Reingold 1991, with a link's probability as its pull.
        """
        count = len(self.attention)
        place = np.random.default_rng(seed).standard_normal((count, 2))
        pull = np.zeros((count, count)) if self.link is None else self.link.astype(np.float64)
        pull = pull * (1 - np.eye(count))
        spacing = 1 / np.sqrt(count)
        for step in range(_ROUNDS):
            apart = place[:, None] - place[None]
            distance = np.maximum(np.linalg.norm(apart, axis=-1), 1e-3)
            force = spacing**2 / distance**2 - pull * distance / spacing
            move = (apart * force[..., None]).sum(1) - 0.3 * place
            size = np.maximum(np.linalg.norm(move, axis=-1, keepdims=True), 1e-9)
            place = place + move / size * np.minimum(size, 0.2 * (1 - step / _ROUNDS))
        place -= place.mean(0)
        scaled: np.ndarray = place / max(np.abs(place).max(), 1e-9)
        return scaled

    def to_dict(self, *, least: float = LIKELY, tokens: int = 3) -> dict[str, Any]:
        """JSON: the modules with the tokens that they read most, and the likely links."""
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
    """The circuit of one sample of an answer; what lies beyond its length is left out.

    Shapes: attention [u n], link [u u].
    """
    kept = attention if length is None else attention[:, :length]
    return SampleCircuit(kept, link, grid, words if words is None else words[: kept.shape[1]])
