# SPDX-License-Identifier: Apache-2.0
"""Grids as rows in the TVMax bodies: neighbors, and the problem restricted to some cells.

A grid is one row of cells [b 1 n], so neighbors are shifts of the row. The dual u [b 2 n] has a
channel for the edge to the cell below and one for the edge to the cell on the right.
"""

from dataclasses import dataclass

from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph

LOWEST = -3.4e38


@dataclass(frozen=True)
class Shifts:
    """Neighbors of cells in grids that are stored as one row; they wrap around at the ends.

    Edges that cross a border have the limit 0, so wrapped values are never used.
    """

    n: str  # cells of a row with padding, as a vector of one number
    below: tuple[str, str]  # start and end of the cells below, in two copies of the row
    right: tuple[str, str]
    from_above: tuple[str, str]  # the same for values of the edges into a cell, channel first
    from_left: tuple[str, str]

    @classmethod
    def of(cls, graph: BodyGraph, n: str, width: str) -> "Shifts":
        """Make the shifts; `n` and `width` are vectors of one number."""
        above = graph("Sub", n, width)
        left = graph("Sub", n, [1])
        return cls(
            n,
            (width, graph("Add", width, n)),
            (graph.constant([1]), graph("Add", n, [1])),
            *(
                (
                    graph("Concat", [channel], start, axis=0),
                    graph("Concat", [channel + 1], graph("Add", start, n), axis=0),
                )
                for channel, start in enumerate((above, left))
            ),
        )

    def ahead(self, graph: BodyGraph, cells: str) -> tuple[str, str]:
        """Return the cells below and to the right of each cell, each [b c n]."""
        twice = graph("Concat", cells, cells, axis=2)
        down, right = (graph("Slice", twice, *cut, [2]) for cut in (self.below, self.right))
        return down, right

    def between(self, graph: BodyGraph, cells: str, edges: str) -> str:
        """Return `edges` [b 2 n] with both ends in `cells` (bool), and 0 for others."""
        present = graph("Cast", cells, to=TensorProto.FLOAT)
        ahead = graph("Concat", *self.ahead(graph, present), axis=1)
        # As a single product of both masks, TensorRT-RTX 1.7 cannot compile this for many sizes.
        return graph("Mul", graph("Mul", edges, present), ahead)

    def around(self, graph: BodyGraph, edges: str) -> tuple[str, str, str, str]:
        """Return each cell's edges down, right, up and left, each [b 1 n]."""
        twice = graph("Concat", edges, edges, axis=2)
        up, left = (
            graph("Slice", twice, *cut, [1, 2]) for cut in (self.from_above, self.from_left)
        )
        down, right = graph.many("Split", 2, edges, axis=1, num_outputs=2)
        return down, right, up, left


@dataclass(frozen=True)
class Problem:
    """min over x of 1/2 ||x - z||^2 + sum over edges of limit |x_i - x_j|."""

    z: str  # [b 1 n], 0 in excluded cells
    limit: str  # [b 2 n], lam or 0
    cells: str  # bool [b 1 n]: included cells
    index: str  # [b 1 n], the number of each cell, float32
    first: str  # int64 [b 1 1], where each grid starts if all are one row
    shifts: Shifts

    def primal(self, graph: BodyGraph, dual: str) -> str:
        """Return z - D'u."""
        down, right, up, left = self.shifts.around(graph, dual)
        return graph("Sub", graph("Sum", self.z, up, left), graph("Add", down, right))

    def pick(self, graph: BodyGraph, values: str, cell: str) -> str:
        """Return `values` [b 1 n] at the cells numbered `cell` (int64 [b 1 n]) of the same grid.

        GatherElements is not used: onnx's evaluator accepts fewer than 32 numbers there.
        """
        row = graph("Reshape", values, [-1])
        return graph("Gather", row, graph("Add", cell, self.first), axis=0)

    def without(self, graph: BodyGraph, cells: str) -> "Problem":
        """Exclude all cells but `cells`; each removed edge lowers z of the remaining cell by lam.

        If an excluded cell's x is below that of its neighbor, the neighbor's x does not change.
        """
        limit = self.shifts.between(graph, cells, self.limit)
        lost = graph("Sum", *self.shifts.around(graph, graph("Sub", self.limit, limit)))
        z = graph("Where", cells, graph("Sub", self.z, lost), 0.0)
        return Problem(z, limit, cells, self.index, self.first, self.shifts)


def projection(graph: BodyGraph, problem: Problem, x: str) -> tuple[str, str]:
    """Return sparsemax of the included cells (0 for others), and its threshold [b 1 1].

    Newton's method on the threshold, from below: it can only rise, so a finished row does not
    change.
    """
    masked = graph("Where", problem.cells, x, LOWEST)
    top = graph("ReduceMax", masked, [2], keepdims=1)
    z = graph("Where", problem.cells, graph("Sub", x, top), -2.0)

    def rise(inner: BodyGraph, _: str, threshold: str) -> tuple[tuple[str], str]:
        step = _newton_step(inner, inner("Relu", inner("Sub", z, threshold)))
        after = inner("Max", inner("Add", threshold, step), threshold)
        risen = inner("ReduceSum", inner("Sub", after, threshold), keepdims=0)
        return (after,), inner("Greater", risen, 0.0)

    start = graph("Sub", graph("Mul", top, 0.0), 1.0)
    (threshold,) = graph.loop(problem.shifts.n, [(start, TensorProto.FLOAT)], rise)
    # The last step is done on the weights, which have more digits than the threshold.
    p = graph("Relu", graph("Sub", z, threshold))
    step = graph("Mul", graph("Sign", p), _newton_step(graph, p))
    return graph("Relu", graph("Sub", p, step)), graph("Add", top, threshold)


def _newton_step(graph: BodyGraph, p: str) -> str:
    count = graph("ReduceSum", graph("Sign", p), [2], keepdims=1)
    excess = graph("Sub", graph("ReduceSum", p, [2], keepdims=1), 1.0)
    return graph("Div", excess, graph("Max", count, 1.0))
