# SPDX-License-Identifier: Apache-2.0
"""TVMax in NumPy float64: exact up to rounding, by splitting the grid along minimum cuts.

A set of cells that is fused in the solution has the mean m of its supplies: the surplus over m can
be routed to the cells below m through its edges, each with a flow of at most lam. If the surplus
cannot be routed, the minimum cut separates cells above m from cells of at most m. The edges of the
cut are saturated, and both sides are solved separately (Chambolle and Darbon 2009, section 4).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from saccade.core.errors import SaccadeError

# A cell with a logit of at most this is masked; the official code uses -1e9.
MASKED_AT_MOST = -1e8
# Surpluses below this fraction of the largest number count as routed.
_ROUTED = 1e-13
# A weight below this fraction is rounding in a cell on the threshold. Such a tie is not part of the
# support, which matters for the gradient.
_NO_WEIGHT = 1e-15


class _Network:
    """Supplies on the vertices of a graph, with a flow of at most `lam` along each edge."""

    def __init__(self, supplies: np.ndarray, edges: np.ndarray, lam: float) -> None:
        self.supplies, self.edges, self.lam = supplies.tolist(), edges.tolist(), lam
        self.flow = [0.0] * len(self.edges)
        self.member = [0] * len(self.supplies)
        self.routed = _ROUTED * max(1.0, lam, float(np.abs(supplies).max(initial=0.0)))
        self.near: list[list[tuple[int, int, int]]] = [[] for _ in self.supplies]
        for edge, (i, j) in enumerate(self.edges):
            self.near[i].append((edge, j, 1))
            self.near[j].append((edge, i, -1))

    def value(self, i: int) -> float:
        """Return the rest of the supply of i after all flows out of and into it."""
        return self.supplies[i] - sum(sign * self.flow[edge] for edge, _, sign in self.near[i])

    def _inside(self, i: int) -> list[tuple[int, int, int]]:
        return [
            neighbour for neighbour in self.near[i] if self.member[neighbour[1]] == self.member[i]
        ]

    def pieces(self, vertices: Sequence[int]) -> list[list[int]]:
        """Return the connected parts of a set of vertices, ordered by their first vertex."""
        pieces, left = [], set(vertices)
        for i in vertices:
            self.member[i] = -1
        for first in vertices:
            if first not in left:
                continue
            left.discard(first)
            piece = [first]
            for i in piece:
                more = [j for _, j, _ in self.near[i] if j in left]
                left.difference_update(more)
                piece.extend(more)
            pieces.append(sorted(piece))
            for i in piece:
                self.member[i] = first
        return pieces

    def above_mean(self, piece: list[int]) -> list[int]:
        """Route surplus to the mean; return the source side of the minimum cut, empty if fused."""
        kept = [self.value(i) for i in piece]
        mean = float(np.mean(kept))
        surplus = {i: value - mean for i, value in zip(piece, kept, strict=True)}
        above: set[int] = set()
        for source in piece:
            while surplus[source] > self.routed and source not in above:
                came, sink = self._search(source, surplus, above)
                if sink is None:
                    above.update(came)
                else:
                    self._push(source, sink, came, surplus)
        if len(above) == len(piece):
            return []
        for i in above:
            for edge, j, sign in self._inside(i):
                if j not in above:
                    self.flow[edge] = sign * self.lam
        return sorted(above)

    def _search(
        self, source: int, surplus: dict[int, float], closed: set[int]
    ) -> tuple[dict[int, tuple[int, int, int] | None], int | None]:
        came: dict[int, tuple[int, int, int] | None] = {source: None}
        queue = deque([source])
        while queue:
            i = queue.popleft()
            for edge, j, sign in self._inside(i):
                room = self.lam - sign * self.flow[edge]
                if j in came or j in closed or room <= self.routed:
                    continue
                came[j] = (edge, i, sign)
                if surplus[j] < -self.routed:
                    return came, j
                queue.append(j)
        return came, None

    def _push(
        self,
        source: int,
        sink: int,
        came: dict[int, tuple[int, int, int] | None],
        surplus: dict[int, float],
    ) -> None:
        path, at = [], sink
        while (step := came[at]) is not None:
            path.append(step)
            at = step[1]
        room = min(self.lam - sign * self.flow[edge] for edge, _, sign in path)
        amount = min(surplus[source], -surplus[sink], room)
        surplus[source] -= amount
        surplus[sink] += amount
        for edge, _, sign in path:
            self.flow[edge] += sign * amount


def fused(
    supplies: np.ndarray, edges: np.ndarray, lam: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Solve the fused signal approximator of a graph: value and group per vertex, duality gap.

    Shapes: supplies [n], edges [e 2] -> values [n], groups [n] (number of the first vertex).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 4, Proposition 2.
    """
    network = _Network(supplies, edges, lam)
    if lam == 0:
        return supplies.copy(), np.arange(len(supplies)), 0.0
    values, groups = np.zeros(len(supplies)), np.zeros(len(supplies), np.int64)
    open_sets = network.pieces(range(len(supplies)))
    while open_sets:
        piece = open_sets.pop()
        above = network.above_mean(piece)
        if above:
            source_side = set(above)
            open_sets += network.pieces(above)
            open_sets += network.pieces([i for i in piece if i not in source_side])
        else:
            values[piece] = np.mean([network.value(i) for i in piece])
            groups[piece] = piece[0]
    reached = np.array([network.value(i) for i in range(len(supplies))])
    flow = np.clip(network.flow, -lam, lam)
    steps = np.array([values[i] - values[j] for i, j in network.edges])
    gap = 0.5 * np.sum((reached - values) ** 2) + np.sum(lam * np.abs(steps) - flow * steps)
    return values, groups, float(gap)


def grid_edges(h: int, w: int) -> np.ndarray:
    """Return the pairs of neighbors in an h x w grid, row-major.

    Shapes: -> [e 2].
    """
    at = np.arange(h * w).reshape(h, w)
    down = np.stack([at[:-1].ravel(), at[1:].ravel()], 1)
    right = np.stack([at[:, :-1].ravel(), at[:, 1:].ravel()], 1)
    return np.concatenate([down, right])


def _solved(z: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray, float]:
    flat = np.asarray(z, np.float64).ravel()
    free = flat > MASKED_AT_MOST
    values, groups = np.full(flat.shape, -np.inf), np.full(flat.shape, -1, np.int64)
    if not (free.any() and np.isfinite(flat[free]).all() and not np.isnan(flat).any()):
        return np.full(z.shape, np.nan), groups.reshape(z.shape), float("nan")
    edges = grid_edges(*z.shape)
    kept = free[edges].all(1)
    lowered = np.bincount(edges[~kept].ravel(), minlength=flat.size)
    number = np.cumsum(free) - 1
    cells = np.flatnonzero(free)
    supplies = flat[cells] - lam * lowered[cells]
    values[cells], levels, gap = fused(supplies, number[edges[kept]], lam)
    groups[cells] = cells[levels]
    return values.reshape(z.shape), groups.reshape(z.shape), gap


def prox(z: np.ndarray, lam: float) -> np.ndarray:
    """Compute the total-variation proximal point of one grid; -inf at masked cells.

    Shapes: z [h w] -> same.
    """
    return _solved(z, lam)[0]


def groups(z: np.ndarray, lam: float) -> np.ndarray:
    """Return the fused group of each cell: the index of its first cell, -1 if masked or NaN.

    Shapes: z [h w] -> same, int64.
    """
    return _solved(z, lam)[1]


def _sparsemax(values: np.ndarray) -> np.ndarray:
    flat = values.ravel() - values.max()
    ordered = np.sort(flat)[::-1]
    sums = np.cumsum(ordered) - 1
    # Rounding decides whether cells on the threshold count; the result is the same either way.
    support = np.count_nonzero(np.arange(1, flat.size + 1) * ordered > sums)
    weights = values - values.max() - sums[support - 1] / support
    return np.where(weights > _NO_WEIGHT * max(1.0, abs(values.max())), weights, 0.0)


def _one(z: np.ndarray, lam: float) -> tuple[np.ndarray, float]:
    if z.size == 0:
        return np.zeros(z.shape), 0.0
    values, _, gap = _solved(z, lam)
    if np.isnan(gap):
        return values, gap
    return _sparsemax(values), float(np.sqrt(2 * gap))


def whole_grids(z: np.ndarray, *, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute TVMax of each grid, and a bound on its Euclidean error.

    Shapes: z [... h w] -> p [... h w], error [...].
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), Proposition 1.
    """
    sizes = np.broadcast_to(np.array(z.shape[-2:], np.int64), (*z.shape[:-2], 2))
    return masked_grids(z, sizes, lam=lam)


def masked_grids(z: np.ndarray, sizes: np.ndarray, *, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute TVMax of the top-left part of each grid, and 0 elsewhere.

    Shapes: z [... h w], sizes [... 2] (height, width) -> p [... h w], error [...].
    Raises: SaccadeError if a size does not fit into the grid.
    """
    h, w = z.shape[-2:]
    if sizes.size and ((sizes < 0).any() or (sizes > (h, w)).any()):
        wrong = sizes[((sizes < 0) | (sizes > (h, w))).any(-1)][0].tolist()
        raise SaccadeError(
            f"saccade::MaskedTVMax: sizes has {wrong}, expected 0 to {h} rows and 0 to {w} "
            "columns. Pass height and width of the included part of each grid."
        )
    p, error = np.zeros(z.shape), np.zeros(z.shape[:-2])
    for index in np.ndindex(*z.shape[:-2]):
        rows, columns = sizes[index]
        inside = np.asarray(z[index][:rows, :columns], np.float64)
        p[index][:rows, :columns], error[index] = _one(inside, lam)
    return p, error
