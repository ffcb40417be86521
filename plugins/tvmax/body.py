# SPDX-License-Identifier: Apache-2.0
"""TVMax and MaskedTVMax as ONNX function bodies of standard operators.

TensorRT sorts at most 3,840 cells, so it can build them only for grids up to that size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE
from saccade.plugins.tvmax.reference import MASKED_AT_MOST

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


def groups(graph: BodyGraph, problem: Problem, u: str) -> str:
    """Return the largest cell number of each cell's group [b 1 n]; unsaturated edges join cells."""
    inside = graph("Less", graph("Abs", u), problem.limit)
    joined = graph("Cast", inside, to=TensorProto.FLOAT)

    def spread(inner: BodyGraph, _: str, label: str) -> tuple[Sequence[str], str]:
        ahead = inner("Concat", *problem.shifts.ahead(inner, label), axis=1)
        edges = inner("Mul", inner("Max", label, ahead), joined)
        after = inner("Max", label, *problem.shifts.around(inner, edges))
        # A label is the number of a cell in the group, whose own label is at least as large.
        for _jump in range(2):
            cell = inner("Cast", after, to=TensorProto.INT64)
            after = problem.pick(inner, after, cell)
        change = inner("ReduceSum", inner("Sub", after, label), keepdims=0)
        return (after,), inner("Greater", change, 0.0)

    (label,) = graph.loop(problem.shifts.n, [(problem.index, TensorProto.FLOAT)], spread)
    return label


def group_averages(graph: BodyGraph, problem: Problem, x: str, label: str) -> str:
    """Return the average of x over the cells of equal label [b 1 n].

    Not every runtime can add while scattering, so cells are sorted by label. A group's sum is the
    difference of the running sums at its ends, which are scattered to the cell of its label. The
    sums are of differences from that cell, which are small, so rounding is small too.
    """
    n, cell = problem.shifts.n, graph("Cast", label, to=TensorProto.INT64)
    base = problem.pick(graph, x, cell)
    labels, order = graph.many("TopK", 2, label, n, axis=2)
    apart = problem.pick(graph, graph("Sub", x, base), order)
    count = graph("Add", problem.index, 1.0)
    running = graph("Concat", graph("CumSum", apart, 2), count, axis=1)

    slot = graph("Cast", labels, to=TensorProto.INT64)
    but_last = graph("Sub", n, [1])
    early = graph("Slice", slot, [0], but_last, [2])
    late = graph("Slice", slot, [1], n, [2])
    same = graph("Equal", early, late)
    # Cells that are not the end of a group go to an extra slot, which is never read.
    last = graph("Slice", slot, but_last, n, [2])
    ends = graph("Concat", graph("Where", same, n, early), last, axis=2)
    starts = graph("Where", same, n, late)
    before = graph("Slice", running, [0], but_last, [2])
    empty = graph("Mul", graph("Concat", running, running, axis=2), 0.0)
    empty = graph("Slice", empty, [0], graph("Add", n, [1]), [2])
    to, since = (
        graph("ScatterElements", empty, graph("Concat", at, at, axis=1), values, axis=2)
        for at, values in ((ends, running), (starts, before))
    )
    sums, counts = graph.many("Split", 2, graph("Sub", to, since), axis=1, num_outputs=2)
    average = graph("Slice", graph("Div", sums, graph("Max", counts, 1.0)), [0], n, [2])
    return graph("Add", base, problem.pick(graph, average, cell))


# Rounds before the first check, and the increment before each later one: a check costs about as
# much as ten rounds.
_FIRST_ROUNDS, _MORE_ROUNDS = 12, 4


def solve(graph: BodyGraph, problem: Problem, tolerance: str, max_iterations: str) -> list[str]:
    """Return p [b 1 n] and a bound [b 1 1] on its distance from the solution.

    Each pass of the loop has some rounds and one check. Grids within the tolerance keep their p.
    """
    dual = graph("Mul", problem.limit, 0.0)
    age = graph("ReduceSum", dual, [1, 2], keepdims=1)
    p, unbounded = graph("Mul", problem.z, 0.0), graph("Add", age, float("inf"))

    def check(inner: BodyGraph, passes: str, done: str, *state: str) -> tuple[Sequence[str], str]:
        u, y, age, z, limit, cells, p, error = state
        now = Problem(z, limit, cells, problem.index, problem.first, problem.shifts)
        planned = inner("Add", inner("Mul", passes, _MORE_ROUNDS), _FIRST_ROUNDS)
        rounds = inner("Min", planned, inner("Sub", max_iterations, done))
        u, y, age = _rounds(inner, now, rounds, u, y, age)
        x, bound = _best_point(inner, now, u)
        projected, threshold = projection(inner, now, x)
        better = inner("And", inner("Less", bound, error), inner("Greater", error, tolerance))
        p, error = inner("Where", better, projected, p), inner("Where", better, bound, error)
        after = _screened(inner, now, x, bound, threshold)
        u, y = (_in_box(inner, after, name) for name in (u, y))
        done = inner("Add", done, rounds)
        go_on = inner(
            "And", inner("Less", done, max_iterations), _any_above(inner, error, tolerance)
        )
        return (done, u, y, age, after.z, after.limit, after.cells, p, error), go_on

    floats = (dual, dual, age, problem.z, problem.limit)
    initial = [(graph.constant(0), TensorProto.INT64)]
    initial += [(name, TensorProto.FLOAT) for name in floats]
    initial += [(problem.cells, TensorProto.BOOL)]
    initial += [(name, TensorProto.FLOAT) for name in (p, unbounded)]
    start = _any_above(graph, unbounded, tolerance)
    return graph.loop(max_iterations, initial, check, start)[-2:]


def _any_above(graph: BodyGraph, error: str, tolerance: str) -> str:
    above = graph("Cast", graph("Greater", error, tolerance), to=TensorProto.FLOAT)
    # A sum and not a maximum: a batch may be empty.
    return graph("Greater", graph("ReduceSum", above, keepdims=0), 0.0)


def _in_box(graph: BodyGraph, problem: Problem, dual: str) -> str:
    return graph("Max", graph("Min", dual, problem.limit), graph("Neg", problem.limit))


def _rounds(
    graph: BodyGraph, problem: Problem, count: str, u: str, y: str, age: str
) -> Sequence[str]:
    """Run projected ascent on the dual from the extrapolated point y, with momentum.

    `age` [b 1 1] counts rounds since a grid's last restart. A grid restarts when a step points
    against the momentum. The step 1/8 is one over the largest eigenvalue of DD'.
    """
    least = graph("Neg", problem.limit)

    def one(inner: BodyGraph, _: str, u: str, y: str, age: str) -> tuple[Sequence[str], bool]:
        x = inner("Mul", problem.primal(inner, y), 0.125)
        uphill = inner("Sub", x, inner("Concat", *problem.shifts.ahead(inner, x), axis=1))
        free = inner("Add", y, uphill)
        after = inner("Max", inner("Min", free, problem.limit), least)
        moved = inner("Sub", after, u)
        agrees = inner("Mul", inner("Sub", after, y), moved)
        against = inner("Less", inner("ReduceSum", agrees, [1, 2], keepdims=1), 0.0)
        age = inner("Where", against, 0.0, age)
        momentum = inner("Div", age, inner("Add", age, 3.0))
        further = inner("Add", after, inner("Mul", momentum, moved))
        return (after, further, inner("Add", age, 1.0)), True

    return graph.loop(count, [(name, TensorProto.FLOAT) for name in (u, y, age)], one)


def _best_point(graph: BodyGraph, problem: Problem, u: str) -> tuple[str, str]:
    """Return the better of x = z - D'u and its averages over groups, with its bound.

    Any u in the box certifies any x: ||x - x*|| <= sqrt(2 gap), where the gap is
    1/2 ||z - D'u - x||^2 + sum over edges of (limit |d| - u d), d = x_i - x_j; both terms are
    >= 0, so nothing cancels. For x = z - D'u the second term cannot become small, because its fused
    cells differ by rounding; for the averages it is 0 there.
    """
    x = problem.primal(graph, u)
    averages = group_averages(graph, problem, x, groups(graph, problem, u))
    points = graph("Concat", x, averages, axis=1)
    rest = graph("Sub", x, points)
    terms = [graph("Mul", graph("Mul", rest, rest), 0.5)]
    limits = graph.many("Split", 2, problem.limit, axis=1, num_outputs=2)
    duals = graph.many("Split", 2, u, axis=1, num_outputs=2)
    ahead = problem.shifts.ahead(graph, points)
    for neighbour, limit, dual in zip(ahead, limits, duals, strict=True):
        d = graph("Sub", points, neighbour)
        terms.append(graph("Sub", graph("Mul", limit, graph("Abs", d)), graph("Mul", dual, d)))
    gap = graph("ReduceSum", graph("Sum", *terms), [2], keepdims=1)
    bounds = graph("Sqrt", graph("Mul", gap, 2.0))
    of_x, of_averages = graph.many("Split", 2, bounds, axis=1, num_outputs=2)
    averaged = graph("LessOrEqual", of_averages, of_x)
    return graph("Where", averaged, averages, x), graph("Min", of_averages, of_x)


def _screened(graph: BodyGraph, problem: Problem, x: str, bound: str, threshold: str) -> Problem:
    """Remove the cells that cannot have a weight from the problem.

    The solution and its threshold are so close to x and its threshold that a cell lower by sqrt(2)
    times the bound stays below. The rest converges faster, because few cells have weights.
    """
    reach = graph("Add", graph("Mul", bound, 1.5), 1e-6)
    near = graph("GreaterOrEqual", x, graph("Sub", threshold, reach))
    return problem.without(graph, graph("And", problem.cells, near))


# Runtimes sum a row in an order that depends on its memory address; with rows of whole vectors, the
# order is the same for every grid of a batch.
_VECTOR = 8


def tvmax(opset: int = 20) -> onnx.FunctionProto:
    """Return the body of `saccade::TVMax`.

    Shapes: Z [... h w] -> P [... h w], error [...] (float32).
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), eq. 6, Proposition 1;
        Beck and Teboulle 2009 (Fast Gradient-Based Algorithms for Constrained Total Variation).
    """
    return _body("TVMax", opset)


def masked_tvmax(opset: int = 20) -> onnx.FunctionProto:
    """Return the body of `saccade::MaskedTVMax`.

    Shapes: Z [... h w], sizes [... 2] int64 -> P [... h w], error [...] (float32).
    Source: as tvmax.
    """
    return _body("MaskedTVMax", opset)


@dataclass(frozen=True)
class _Rows:
    """Grids as rows [b 1 n], with n padded to whole vectors."""

    shape: str
    leading: str
    cells: str  # h w, as a vector of one number, like the next
    n: str
    z: str
    inside: str  # bool [1 1 n] or [b 1 n]
    bordering: str  # [1 2 n], 0 where an edge would leave the grid
    index: str  # int64 [n]
    shifts: Shifts


def _body(name: str, opset: int) -> onnx.FunctionProto:
    op, graph = OPS[name], BodyGraph()
    lam, tolerance = (graph.attribute(name, float) for name in ("lam", "tolerance"))
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
        each_size = graph("Reshape", sizes, graph("Concat", batch, [1, 2], axis=0), allowzero=1)
        high, wide = graph.many("Split", 2, each_size, axis=2, num_outputs=2)
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
    """Return the problem of the cells that may get a weight, and the grids without an answer.

    A cell more than 1 + 8 lam below the maximum has no weight: x is at most 4 lam above z there and
    at most 4 lam below the largest z somewhere, and sparsemax cuts at 1 below the largest x.
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
