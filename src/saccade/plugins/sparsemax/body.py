# SPDX-License-Identifier: Apache-2.0
"""Sparsemax as an ONNX function body of standard operators, without sorting."""

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from saccade.plugins.body_graph import BodyGraph
from saccade.plugins.ops import OPS

# Newton's steps before the first look at whether any row still moves: a look costs as much as
# half a step, and a batch of some hundred rows of logits needs about six.
_FIRST_ROUNDS = 6
# As many after the first may go back as far as they like.
_FREE_ROUNDS = 4


def sparsemax(opset: int = 20) -> onnx.FunctionProto:
    """Body of `saccade::Sparsemax`, in float32 whatever the type.

    With z = X minus the largest of the row, Newton's method on sum(max(z - t, 0)) = 1 rises from
    t = -1, which is no higher than the threshold, and but for rounding never passes it; the number
    of entries above t falls until they are the support, from which the step is exact. In the loop a
    row whose number did not fall is done and stays as it is.

    Shapes: X [... n] -> Y [... n].
    Source: Held, Wolfe and Crowder 1974 (Validation of subgradient optimization), section 2.
    """
    graph = BodyGraph()
    x = graph("Cast", "X", to=TensorProto.FLOAT)
    z = graph("Sub", x, graph("ReduceMax", x, [-1]))
    # max(z + 1, 0), as z <= 0.
    total, most = _total_and_count(graph, graph("HardSigmoid", z, alpha=1.0, beta=1.0))
    # NaN where z has one: its entries are at most 0, so that nothing else makes their sum NaN. And
    # where no entry is finite: OpenVINO's largest of -inf is a number, and -inf times 0 is not.
    broken = graph("Mul", graph("ReduceSum", z, [-1]), total)
    # A tensor of the rows' shape: runtimes are slow where a scalar meets a column.
    one = graph("Sign", most)
    # The sum of z without the addend 1; rounding of a long sum must not lift t to 0.
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
    """Newton's step from t, and the number of entries above t.

    Rounding may take a step past the threshold, and past entries that are almost equal there. The
    way back, on the slope ahead, is then too long, and the next step makes it good. In the end
    only rounding in the last place is left, and going to and fro has to stop: with `most`, a number
    of entries that no slope exceeds, the way back is never too long.
    """
    total, count = _total_and_count(graph, graph("Relu", graph("Sub", z, t)))
    excess = graph("Sub", total, one)
    step = graph("Div", excess, count)
    return (graph("Max", step, graph("Div", excess, most)) if most else step), count


def _total_and_count(graph: BodyGraph, above: str) -> tuple[str, str]:
    """Sum of a row's entries, and number of those that are not 0."""
    total = graph("ReduceSum", above, [-1])
    # The slope makes 1 of whatever is not 0; ONNX Runtime's Sign is four times as slow. The shift
    # is lost in the sum, but a 0 there is read as the default, 0.5, by OpenVINO.
    some = graph("HardSigmoid", above, alpha=1e30, beta=1e-30)
    return total, graph("ReduceSum", some, [-1])


def _any(graph: BodyGraph, changes: str) -> str:
    # A sum and not a maximum: a batch may be empty.
    return graph("Cast", graph("ReduceL1", changes, keepdims=0), to=TensorProto.BOOL)


def _or_nan(graph: BodyGraph, p: str, broken: str, one: str) -> str:
    """NaN in rows where `broken` is: on some devices the larger of NaN and 0 is 0."""
    return graph("Add", p, graph("Where", graph("IsNaN", broken), broken, graph("Sub", one, one)))
