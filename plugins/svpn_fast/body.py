# SPDX-License-Identifier: Apache-2.0
"""SvPNFast as an ONNX function body of standard operators, one Loop for all iterations."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS
from saccade.plugins.svpn.body import whole_vectors
from saccade.plugins.svpn_fast.contract import SMALLEST_NORM


def svpn_fast(opset: int = 20) -> onnx.FunctionProto:
    """Return the body of `saccade::SvPNFast`, computed in float32 for every type.

    Each matrix is divided by its largest entry c, so that squares stay in float32's range. Limits
    on norms in the contract therefore apply to c times the norm.

    Shapes: Q [... m n], v0 [n] -> Y [... m n].
    Source: Xie et al. 2021 (SoT), eq. 6 to 8.
    """
    graph = BodyGraph()
    alpha, epsilon = graph.attribute("alpha", float), graph.attribute("epsilon", float)
    values = graph.attribute("singular_values", int)
    iterations = graph.attribute("iterations", int)
    scaled = _scaled(graph)
    few = graph("ReduceMin", graph("Shape", "Q", start=-2), keepdims=0)
    all_values = graph("Equal", values, 0)
    steps = graph("Where", all_values, few, values)
    rest, total, s = _peel(graph, scaled, alpha, steps, iterations)

    divisor = graph("Add", graph("Pow", s, graph("Sub", 1.0, alpha)), epsilon)
    divides = graph("Greater", divisor, 0.0)
    inverse = graph("Div", scaled.largest, graph("Where", divides, divisor, 1.0))
    added = graph("And", divides, graph("Not", all_values))
    remainder = graph("Mul", rest, graph("Where", added, inverse, 0.0))
    y = graph("Where", scaled.broken, float("nan"), graph("Add", total, remainder))
    y = graph("Slice", y, [0, 0, 0], scaled.shape, [0, 1, 2])
    y = graph("Reshape", y, graph("Shape", "Q"), allowzero=1)
    return graph.function(OPS["SvPNFast"], [graph("CastLike", y, "Q")], opset)


@dataclass(frozen=True)
class _PaddedInputs:
    """Matrices and the start vector, padded with zeros to whole vectors.

    A zero matrix is appended: for a batch of one, ONNX Runtime would sum in another order.
    """

    shape: str  # b - 1, m and n
    x: str  # [b rows columns], divided by the largest entry
    start: str  # [1 1 columns]
    largest: str  # [b 1 1]
    broken: str  # [b 1 1], whether an entry is not finite


def _scaled(graph: BodyGraph) -> _PaddedInputs:
    batch = graph("ReduceProd", graph("Concat", [1], graph("Shape", "Q", end=-2), axis=0))
    m, n = graph("Shape", "Q", start=-2, end=-1), graph("Shape", "Q", start=-1)
    shape = graph("Concat", batch, m, n, axis=0)
    x = graph("Reshape", "Q", shape, allowzero=1)
    more_rows = graph("Sub", whole_vectors(graph, m), m)
    more_columns = graph("Sub", whole_vectors(graph, n), n)
    behind = graph("Concat", [0, 0, 0, 1], more_rows, more_columns, axis=0)
    x = graph("Pad", graph("Cast", x, to=TensorProto.FLOAT), behind)
    start = graph("Unsqueeze", graph("Cast", "v0", to=TensorProto.FLOAT), [0, 1])
    start = graph("Pad", start, graph("Concat", [0, 0, 0, 0, 0], more_columns, axis=0))

    size = graph("Abs", x)
    finite = graph("Cast", graph("Less", size, float("inf")), to=TensorProto.FLOAT)
    broken = graph("Less", graph("ReduceMin", finite, [1, 2]), 0.5)
    largest = graph("ReduceMax", graph("Where", broken, 0.0, size), [1, 2])
    largest = graph("Where", graph("Greater", largest, 0.0), largest, 1.0)
    x = graph("Div", graph("Where", broken, 0.0, x), largest)
    return _PaddedInputs(shape, x, start, largest, broken)


def _peel(
    graph: BodyGraph, scaled: _PaddedInputs, alpha: str, steps: str, iterations: str
) -> list[str]:
    """Return the rest of x, the sum of s^alpha u v', and the last s.

    Shapes: -> [b rows columns], [b rows columns], [b 1 1].
    """
    largest = scaled.largest
    smallest = graph("Div", SMALLEST_NORM, largest)
    last_round = graph("Sub", iterations, 1)

    def round_(
        inner: BodyGraph, number: str, rest: str, total: str, v: str, _: str
    ) -> tuple[Sequence[str], bool]:
        turn = inner("Mod", number, iterations)
        v = inner("Where", inner("Equal", turn, 0), scaled.start, v)
        u = _unit(inner, inner("ReduceSum", inner("Mul", rest, v), [2]), 1, smallest)
        image = inner("ReduceSum", inner("Mul", rest, u), [1])
        v = _unit(inner, image, 2, smallest)
        share = inner("ReduceSum", inner("Mul", image, v), [2])
        s = inner("Mul", share, largest)
        ended = inner("Equal", turn, last_round)
        outer = inner("Where", ended, inner("Mul", u, v), 0.0)
        total = inner("Add", total, inner("Mul", inner("Pow", s, alpha), outer))
        rest = inner("Sub", rest, inner("Mul", share, outer))
        return (rest, total, v, s), True

    nothing = graph("Mul", scaled.x, 0.0)
    no_value = graph("Sub", largest, largest)
    v = graph("Add", scaled.start, no_value)
    carried = [(name, TensorProto.FLOAT) for name in (scaled.x, nothing, v, no_value)]
    rest, total, _, s = graph.loop(graph("Mul", steps, iterations), carried, round_)
    return [rest, total, s]


def _unit(graph: BodyGraph, x: str, axis: int, smallest: str) -> str:
    norm = graph("Sqrt", graph("ReduceSumSquare", x, [axis]))
    return graph("Div", x, graph("Max", norm, smallest))
