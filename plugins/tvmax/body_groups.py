# SPDX-License-Identifier: Apache-2.0
"""Groups of fused cells in the TVMax bodies: found from the dual, and averaged."""

from collections.abc import Sequence

from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.tvmax.body_problem import Problem


def groups(graph: BodyGraph, problem: Problem, u: str) -> str:
    """The largest cell number of each cell's group [b 1 n]; edges inside the box join."""
    inside = graph("Less", graph("Abs", u), problem.limit)
    joined = graph("Cast", inside, to=TensorProto.FLOAT)

    def spread(inner: BodyGraph, _: str, label: str) -> tuple[Sequence[str], str]:
        ahead = inner("Concat", *problem.shifts.ahead(inner, label), axis=1)
        edges = inner("Mul", inner("Max", label, ahead), joined)
        after = inner("Max", label, *problem.shifts.around(inner, edges))
        # A label is the number of a cell of the group, whose own label is as good or better.
        for _jump in range(2):
            cell = inner("Cast", after, to=TensorProto.INT64)
            after = problem.pick(inner, after, cell)
        change = inner("ReduceSum", inner("Sub", after, label), keepdims=0)
        return (after,), inner("Greater", change, 0.0)

    (label,) = graph.loop(problem.shifts.n, [(problem.index, TensorProto.FLOAT)], spread)
    return label


def group_averages(graph: BodyGraph, problem: Problem, x: str, label: str) -> str:
    """Average of x over the cells of equal label [b 1 n].

    Not every runtime can add up while scattering, so cells are sorted by label: a group's sum is
    the difference of the running sums at its ends, which are scattered to where its label points.
    Summed are differences from the cell there: they are small, and so is the rounding.
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
    # What is not the end of a group goes to one more slot, which nobody reads.
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
