# SPDX-License-Identifier: Apache-2.0
"""Sparsemax as an ONNX function body of standard operators, without sorting."""

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS

# Newton steps before the first check whether any row still changes: a check costs as much as half
# a step, and a batch of a few hundred rows of logits needs about six steps.
_FIRST_ROUNDS = 6
# This many steps after the first may go back any distance.
_FREE_ROUNDS = 4


def sparsemax(opset: int = 20) -> onnx.FunctionProto:
    """Return the body of `saccade::Sparsemax`, computed in float32 for every type.

    Let z be X minus the largest entry of its row. Newton's method on sum(max(z - t, 0)) = 1 starts
    at t = -1, which is at most the threshold. Apart from rounding, t rises and never passes the
    threshold. The number of entries above t falls until they are the support; then the step is
    exact. In the loop, a row whose number did not fall is finished and does not change.

    Shapes: X [... n] -> Y [... n].
    Source: Held, Wolfe and Crowder 1974 (Validation of subgradient optimization), section 2.
    """
    graph = BodyGraph()
    x = graph("Cast", "X", to=TensorProto.FLOAT)
    z = graph("Sub", x, graph("ReduceMax", x, [-1]))
    # max(z + 1, 0), since z <= 0.
    total, most = _total_and_count(graph, graph("HardSigmoid", z, alpha=1.0, beta=1.0))
    # NaN in rows where z has a NaN: entries are at most 0, so nothing else makes their sum NaN. And
    # in rows without a finite entry: OpenVINO's maximum of -inf is finite, and -inf times 0 is NaN.
    broken = graph("Mul", graph("ReduceSum", z, [-1]), total)
    # A tensor with the rows' shape: runtimes are slow at combining a scalar with a column.
    one = graph("Sign", most)
    # Sum z without adding 1 to each: rounding of a long sum must not raise t to 0.
    sum_of_z = graph("Clip", graph("Sub", total, most), "", 0.0)
    t, count = graph("Div", graph("Sub", sum_of_z, one), most), most
    for after in range(1, _FIRST_ROUNDS):
        before = count
        step, count = _step(graph, z, t, one, most if after > _FREE_ROUNDS else None)
        t = graph("Add", t, step)

    def round_(inner: BodyGraph, _: str, t: str, before: str) -> tuple[Sequence[str], str]:
        step, count = _step(inner, z, t, one, most)
        fell = inner("Cast", inner("Less", count, before), to=TensorProto.FLOAT)
        return (inner("Add", t, inner("Mul", step, fell)), count), _any(inner, fell)

    carried = [(t, TensorProto.FLOAT), (count, TensorProto.FLOAT)]
    t, _ = graph.loop("", carried, round_, _any(graph, graph("Sub", before, count)))
    p = graph("Relu", graph("Sub", z, t))
    p = graph("CastLike", _or_nan(graph, p, broken, one), "X")
    return graph.function(OPS["Sparsemax"], [p], opset)


def _step(graph: BodyGraph, z: str, t: str, one: str, most: str | None = None) -> tuple[str, str]:
    """Return Newton's step from t, and the number of entries above t.

    Rounding may take a step past the threshold and past nearly equal entries there. The step back,
    which uses the slope beyond the threshold, is then too long, and the next step corrects it. At
    the end only rounding in the last place is left, and the alternation has to stop. With `most`,
    a bound on the number of entries, the step back is never too long.
    """
    total, count = _total_and_count(graph, graph("Relu", graph("Sub", z, t)))
    excess = graph("Sub", total, one)
    step = graph("Div", excess, count)
    return (graph("Max", step, graph("Div", excess, most)) if most else step), count


def _total_and_count(graph: BodyGraph, above: str) -> tuple[str, str]:
    """Return the sum of a row's entries, and the number of nonzero ones."""
    total = graph("ReduceSum", above, [-1])
    # The slope maps every positive entry to 1; ONNX Runtime's Sign is four times slower. The shift
    # is lost in rounding, but OpenVINO replaces a shift of 0 by the default, 0.5.
    some = graph("HardSigmoid", above, alpha=1e30, beta=1e-30)
    return total, graph("ReduceSum", some, [-1])


def _any(graph: BodyGraph, changes: str) -> str:
    # A sum and not a maximum: a batch may be empty.
    return graph("Cast", graph("ReduceL1", changes, keepdims=0), to=TensorProto.BOOL)


def _or_nan(graph: BodyGraph, p: str, broken: str, one: str) -> str:
    """Return NaN in rows where `broken` is NaN: on some devices max(NaN, 0) is 0."""
    return graph("Add", p, graph("Where", graph("IsNaN", broken), broken, graph("Sub", one, one)))
