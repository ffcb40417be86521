# SPDX-License-Identifier: Apache-2.0
"""SvPN as an ONNX function body of standard operators: one-sided Jacobi in tournament rounds.

A round rotates n / 2 pairs of the n columns at the same time. Then the columns change places, so
that every pair has met after n - 1 rounds. Newton-Schulz would need fewer operators, but gives NaN
for rank-deficient matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS
from saccade.plugins.svpn.contract import RANK_THRESHOLD

# Cosines that float32 can still reduce; columns that count as 0, relative to the whole matrix.
_TURNED, _IGNORED = 3e-7, 1e-7
# A sweep without a larger cosine leaves about the product of two such cosines.
_SMALL_COSINE, _SMALL_TANGENT = 3e-5, 3e-4
# Columns are padded with zeros to whole vectors: ONNX Runtime first adds the numbers up to the next
# vector boundary, so a sum would otherwise depend on the position of a matrix in the batch.
VECTOR = 16
# Six to nine are needed; the bound is in case rounding prevents convergence.
_MOST_SWEEPS = 30


def svpn(opset: int = 20) -> onnx.FunctionProto:
    """Return the body of `saccade::SvPN`, computed in float32 for every type.

    The columns g_j of Q (or of its transpose, if that has fewer) are rotated until they are
    orthogonal. The vectors v_j, initially the identity, are rotated with them. Then
    Q = sum g_j v_j', s_j = |g_j|, and Y = sum s_j^(alpha - 1) g_j v_j'. A matrix with orthogonal
    columns is not changed any more.

    Shapes: Q [... m n] -> Y [... m n].
    Source: Hestenes 1958 (Inversion of matrices by biorthogonalization and related results).
    """
    graph = BodyGraph()
    alpha = graph.attribute("alpha", float)
    sides = _sides(graph)
    flat = graph("Reshape", "Q", graph("Concat", sides.batch, sides.size, axis=0), allowzero=1)
    # One zero after each matrix, with which missing columns are filled.
    flat = graph("Pad", graph("Cast", flat, to=TensorProto.FLOAT), [0, 0, 0, 1])
    finite = graph("Less", graph("Abs", flat), float("inf"))
    whole = graph("ReduceMin", graph("Cast", finite, to=TensorProto.FLOAT), [1])
    broken = graph("Less", whole, 0.5)
    flat = graph("Where", broken, 0.0, flat)
    largest = graph("ReduceMax", graph("Abs", flat), [1])
    largest = graph("Where", graph("Greater", largest, 0.0), largest, 1.0)

    g = graph("Gather", graph("Div", flat, largest), _columns_of(graph, sides), axis=1)
    g, v = _orthogonal(graph, g, _identity(graph, sides), sides)
    unscaled = graph("Unsqueeze", graph("Pow", largest, alpha), [2])
    factor = graph("Mul", _weights(graph, g, alpha), unscaled)
    y = graph("MatMul", graph("Transpose", graph("Mul", g, factor), perm=[0, 2, 1]), v)
    padded = graph("Concat", sides.batch, graph("Mul", sides.long, sides.few), axis=0)
    y = graph("Reshape", y, padded, allowzero=1)
    y = graph("Gather", y, _places_of(graph, sides), axis=1)
    y = graph("Where", broken, float("nan"), y)
    y = graph("Reshape", y, graph("Shape", "Q"), allowzero=1)
    return graph.function(OPS["SvPN"], [graph("CastLike", y, "Q")], opset)


@dataclass(frozen=True)
class _Sides:
    """Sizes of the matrices, each a vector with one integer."""

    batch: str
    m: str
    n: str
    size: str  # m n
    wide: str  # whether m < n
    tall: str  # the larger of m and n
    long: str  # the same, rounded up to whole vectors
    few: str  # the smaller
    count: str  # number of columns, made even and at least 2


def _sides(graph: BodyGraph) -> _Sides:
    batch = graph("ReduceProd", graph("Concat", [1], graph("Shape", "Q", end=-2), axis=0))
    m, n = graph("Shape", "Q", start=-2, end=-1), graph("Shape", "Q", start=-1)
    few, tall = graph("Min", m, n), graph("Max", m, n)
    half = graph("Max", graph("Div", graph("Add", few, [1]), [2]), [1])
    return _Sides(
        batch,
        m,
        n,
        graph("Mul", m, n),
        graph("Less", m, n),
        tall,
        whole_vectors(graph, tall),
        few,
        graph("Mul", half, [2]),
    )


def whole_vectors(graph: BodyGraph, size: str) -> str:
    """Round `size` up to a positive multiple of VECTOR."""
    vectors = graph("Div", graph("Add", size, [VECTOR - 1]), [VECTOR])
    return graph("Mul", graph("Max", vectors, [1]), [VECTOR])


def _range(graph: BodyGraph, end: str) -> str:
    return graph("Range", 0, graph("Squeeze", end, [0]), 1)


def _columns_of(graph: BodyGraph, sides: _Sides) -> str:
    """Return the index of element i of column j in a flat matrix, as [j i]; padding: the zero's."""
    column = graph("Unsqueeze", _range(graph, sides.count), [1])
    row = graph("Unsqueeze", _range(graph, sides.long), [0])
    row_step = graph("Where", sides.wide, [1], sides.n)
    column_step = graph("Where", sides.wide, sides.n, [1])
    place = graph("Add", graph("Mul", row, row_step), graph("Mul", column, column_step))
    exists = graph("And", graph("Less", column, sides.few), graph("Less", row, sides.tall))
    return graph("Where", exists, place, sides.size)


def _places_of(graph: BodyGraph, sides: _Sides) -> str:
    """Return the index of each entry of Y in the flat answer, which has the long side first."""
    row = graph("Unsqueeze", _range(graph, sides.m), [1])
    column = graph("Unsqueeze", _range(graph, sides.n), [0])
    row_step = graph("Where", sides.wide, [1], sides.few)
    column_step = graph("Where", sides.wide, sides.few, [1])
    place = graph("Add", graph("Mul", row, row_step), graph("Mul", column, column_step))
    return graph("Reshape", place, [-1])


def _identity(graph: BodyGraph, sides: _Sides) -> str:
    column = graph("Unsqueeze", _range(graph, sides.count), [1])
    ones = graph("Equal", column, graph("Unsqueeze", _range(graph, sides.few), [0]))
    shape = graph("Concat", sides.batch, sides.count, sides.few, axis=0)
    return graph("Expand", graph("Cast", ones, to=TensorProto.FLOAT), shape)


def _next_places(graph: BodyGraph, count: str) -> str:
    """Return the permutation after a round: the first column stays, the others rotate.

    Pairs are (i, i + half); the ring is 1 .. half - 1, then count - 1 .. half.
    """
    half, last = graph("Div", count, [2]), graph("Sub", count, [1])
    place = _range(graph, count)
    step = graph("Where", graph("Less", place, half), -1, 1)
    source = graph("Add", place, step)
    source = graph(
        "Where", graph("Equal", place, last), graph("Max", graph("Sub", half, [1]), [1]), source
    )
    source = graph("Where", graph("Equal", place, [1]), half, source)
    return graph("Where", graph("Equal", place, [0]), [0], source)


def _orthogonal(graph: BodyGraph, g: str, v: str, sides: _Sides) -> list[str]:
    """Rotate g and v until the columns of g are orthogonal.

    Shapes: g [b count long], v [b count few] -> the same.
    """
    rounds = graph("Squeeze", graph("Sub", sides.count, [1]), [0])
    last_round = graph("Sub", rounds, 1)
    source = _next_places(graph, sides.count)
    total = graph("ReduceSumSquare", g, [1, 2])
    smallest = graph("Mul", total, _IGNORED**2)
    # A tensor of shape [b 1 1].
    one = graph("Add", graph("Mul", total, 0.0), 1.0)

    def round_(
        inner: BodyGraph, number: str, g: str, v: str, live: str, unsettled: str
    ) -> tuple[Sequence[str], str]:
        first, second = inner.many("Split", 2, g, axis=1, num_outputs=2)
        cosine, sine, large = _angle(inner, first, second, live, smallest)
        unsettled = inner("Max", unsettled, inner("ReduceMax", large, [1]))
        turned = [
            inner("Gather", _turn(inner, halves, cosine, sine), source, axis=1)
            for halves in ((first, second), inner.many("Split", 2, v, axis=1, num_outputs=2))
        ]
        ended = inner("Equal", inner("Mod", number, rounds), last_round)
        live = inner("Where", ended, inner("Mul", live, unsettled), live)
        unsettled = inner("Where", ended, 0.0, unsettled)
        left = inner("ReduceSum", live, keepdims=0)
        return (*turned, live, unsettled), inner("Greater", left, 0.0)

    most = graph("Mul", rounds, _MOST_SWEEPS)
    none = graph("Sub", one, one)
    carried = [(name, TensorProto.FLOAT) for name in (g, v, one, none)]
    return graph.loop(most, carried, round_)[:2]


def _angle(
    graph: BodyGraph, first: str, second: str, live: str, smallest: str
) -> tuple[str, str, str]:
    """Return cosine and sine that make each pair orthogonal, and 1 if it was far from that.

    Shapes: first, second [b pairs long], live, smallest [b 1 1] -> three of [b pairs 1].
    """
    a, b = graph("ReduceSumSquare", first, [2]), graph("ReduceSumSquare", second, [2])
    product = graph("ReduceSum", graph("Mul", first, second), [2])
    long_enough = graph("Greater", graph("Min", a, b), smallest)
    counts = graph("And", long_enough, graph("Greater", live, 0.5))
    lengths, size = graph("Sqrt", graph("Mul", a, b)), graph("Abs", product)
    turned = graph("And", counts, graph("Greater", size, graph("Mul", lengths, _TURNED)))
    gap, twice = graph("Sub", a, b), graph("Mul", product, 2.0)
    span = graph("Sqrt", graph("Add", graph("Mul", gap, gap), graph("Mul", twice, twice)))
    # The smaller of the two angles.
    divisor = graph("Add", gap, graph("Where", graph("Less", gap, 0.0), graph("Neg", span), span))
    tangent = graph("Div", twice, graph("Where", turned, divisor, 1.0))
    tangent = graph("Where", turned, tangent, 0.0)
    far = graph("And", counts, graph("Greater", size, graph("Mul", lengths, _SMALL_COSINE)))
    far = graph("Or", far, graph("Greater", graph("Abs", tangent), _SMALL_TANGENT))
    square = graph("Add", graph("Mul", tangent, tangent), 1.0)
    cosine = graph("Reciprocal", graph("Sqrt", square))
    return cosine, graph("Mul", cosine, tangent), graph("Cast", far, to=TensorProto.FLOAT)


def _turn(graph: BodyGraph, halves: Sequence[str], cosine: str, sine: str) -> str:
    first, second = halves
    return graph(
        "Concat",
        graph("Add", graph("Mul", cosine, first), graph("Mul", sine, second)),
        graph("Sub", graph("Mul", cosine, second), graph("Mul", sine, first)),
        axis=1,
    )


def _weights(graph: BodyGraph, g: str, alpha: str) -> str:
    """Return s^(alpha - 1) for each column, 0 for a column that counts as 0; as [b count 1]."""
    s = graph("Sqrt", graph("ReduceSumSquare", g, [2]))
    least = graph("Mul", graph("ReduceMax", s, [1]), RANK_THRESHOLD["float32"])
    kept = graph("Greater", s, least)
    power = graph("Pow", graph("Where", kept, s, 1.0), graph("Sub", alpha, 1.0))
    return graph("Where", kept, power, 0.0)
