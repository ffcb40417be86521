# SPDX-License-Identifier: Apache-2.0
"""Soft thresholding as an ONNX function body."""

import onnx
from fakes.soft_threshold.contract import soft_threshold as contract

from saccade.plugins.body_graph import BodyGraph


def soft_threshold(opset: int = 20) -> onnx.FunctionProto:
    """Shapes: X [... n] -> Y [... n]."""
    graph = BodyGraph()
    x = graph("Cast", "X", to=onnx.TensorProto.FLOAT)
    lam = graph.attribute("lam", float)
    above = graph("Relu", graph("Sub", x, lam))
    below = graph("Relu", graph("Sub", graph("Neg", x), lam))
    y = graph("CastLike", graph("Sub", above, below), "X")
    return graph.function(contract, [y], opset)
