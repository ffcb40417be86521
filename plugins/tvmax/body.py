# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax as ONNX function bodies of standard operators.

TensorRT sorts at most 3,840 cells, and so builds them for grids up to that size.
"""

from dataclasses import dataclass

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS
from saccade.plugins.tvmax.body_problem import LOWEST, Problem, Shifts
from saccade.plugins.tvmax.body_rounds import solve
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE
from saccade.plugins.tvmax.reference import MASKED_AT_MOST

# Runtimes add up a row in an order that depends on where in memory it starts; with rows of whole
# vectors it is the same order for every grid of a batch.
_VECTOR = 8


def tvmax(opset: int = 20) -> onnx.FunctionProto:
    """Body of `saccade::TVMax`.

    Shapes: Z [... h w] -> P [... h w], error [...] (float32).
    Source: Martins et al. 2020 (Sparse and Structured Visual Attention), eq. 6, Proposition 1;
        Beck and Teboulle 2009 (Fast Gradient-Based Algorithms for Constrained Total Variation).
    """
    return _body("TVMax", opset)


def masked_tvmax(opset: int = 20) -> onnx.FunctionProto:
    """Body of `saccade::MaskedTVMax`.

    Shapes: Z [... h w], sizes [... 2] int64 -> P [... h w], error [...] (float32).
    Source: as tvmax.
    """
    return _body("MaskedTVMax", opset)


@dataclass(frozen=True)
class _Rows:
    """Grids as rows [b 1 n], n padded to whole vectors."""

    shape: str
    leading: str
    cells: str  # h w, as a vector of one like the next
    n: str
    z: str
    inside: str  # bool [1 1 n] or [b 1 n]
    bordering: str  # [1 2 n], 0 where an edge would leave the grid
    index: str  # int64 [n]
    shifts: Shifts


def _body(name: str, opset: int) -> onnx.FunctionProto:
    op, graph = OPS[name], BodyGraph()
    lam, tolerance = (graph.attribute(each, float) for each in ("lam", "tolerance"))
    max_iterations = graph.attribute("max_iterations", int)
    rows = _rows(graph, "sizes" if len(op.inputs) > 1 else None)
    problem, broken = _problem(graph, rows, lam)
    tolerance = graph("Max", tolerance, SMALLEST_FLOAT32_TOLERANCE)
    p, error = solve(graph, problem, tolerance, max_iterations)
    p = graph("Where", graph("And", broken, rows.inside), float("nan"), p)
    p = graph("Slice", p, [0], rows.cells, [2])
    p = graph("CastLike", graph("Reshape", p, rows.shape, allowzero=1), "Z")
    error = graph("Where", broken, float("nan"), error)
    return graph.function(op, (p, graph("Reshape", error, rows.leading, allowzero=1)), opset)


def _rows(graph: BodyGraph, sizes: str | None) -> _Rows:
    shape, leading = graph("Shape", "Z"), graph("Shape", "Z", end=-2)
    height, width = graph("Shape", "Z", start=-2, end=-1), graph("Shape", "Z", start=-1)
    batch = graph("ReduceProd", graph("Concat", [1], leading, axis=0), keepdims=1)
    cells = graph("Mul", height, width)
    vectors = graph("Div", graph("Add", cells, _VECTOR - 1), _VECTOR)
    n = graph("Mul", graph("Max", vectors, [1]), _VECTOR)
    z = graph("Reshape", "Z", graph("Concat", batch, [1], cells, axis=0), allowzero=1)
    after = graph("Concat", [0, 0, 0, 0, 0], graph("Sub", n, cells), axis=0)
    z = graph("Pad", graph("Cast", z, to=TensorProto.FLOAT), after)

    index = graph("Range", 0, graph("Squeeze", n, [0]), 1)
    some_width = graph("Max", width, [1])
    row = graph("Div", index, some_width)
    column = graph("Sub", index, graph("Mul", row, some_width))
    inside = graph("Unsqueeze", graph("Less", index, cells), [0, 1])
    if sizes:
        each = graph("Reshape", sizes, graph("Concat", batch, [1, 2], axis=0), allowzero=1)
        high, wide = graph.many("Split", 2, each, axis=2, num_outputs=2)
        within = graph("And", graph("Less", row, high), graph("Less", column, wide))
        inside = graph("And", inside, within)
    not_last = [
        graph("Cast", graph("Unsqueeze", graph("Less", at, end), [0, 1]), to=TensorProto.FLOAT)
        for at, end in ((row, graph("Sub", height, [1])), (column, graph("Sub", width, [1])))
    ]
    bordering = graph("Concat", *not_last, axis=1)
    shifts = Shifts.of(graph, n, width)
    return _Rows(shape, leading, cells, n, z, inside, bordering, index, shifts)


def _problem(graph: BodyGraph, rows: _Rows, lam: str) -> tuple[Problem, str]:
    """The problem of the cells that may get a weight, and the grids that have no answer.

    A cell more than 1 + 8 lam under the maximum has no weight: x is at most 4 lam above z there
    and 4 lam below the largest z somewhere, and sparsemax cuts 1 under the largest x.
    """
    number = graph("Less", rows.z, float("inf"))
    bad = graph("And", rows.inside, graph("Not", number))
    unmasked = graph("And", number, graph("Greater", rows.z, MASKED_AT_MOST))
    allowed = graph("And", rows.inside, unmasked)
    none = graph("Greater", _any(graph, rows.inside), _any(graph, allowed))
    broken = graph("Or", graph("Greater", _any(graph, bad), 0.0), none)

    top = graph("ReduceMax", graph("Where", allowed, rows.z, LOWEST), [2], keepdims=1)
    z = graph("Sub", graph("Where", allowed, rows.z, top), top)
    lowest = graph("Sub", -1.001, graph("Mul", lam, 8.01))
    hopeful = graph("And", graph("Greater", z, lowest), graph("Not", broken))
    index = graph("Cast", graph("Expand", rows.index, graph("Shape", z)), to=TensorProto.FLOAT)
    limit = rows.shifts.between(graph, rows.inside, graph("Mul", rows.bordering, lam))
    grids = graph("Range", 0, graph("Gather", graph("Shape", z), 0), 1)
    first = graph("Reshape", graph("Mul", grids, rows.n), [-1, 1, 1])
    grid = Problem(z, limit, rows.inside, index, first, rows.shifts)
    return grid.without(graph, graph("And", allowed, hopeful)), broken


def _any(graph: BodyGraph, cells: str) -> str:
    return graph("ReduceMax", graph("Cast", cells, to=TensorProto.FLOAT), [2], keepdims=1)
