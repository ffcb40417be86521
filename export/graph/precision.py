# SPDX-License-Identifier: Apache-2.0
"""A component's graph in one precision, which is verified, and custom ops written out."""

from collections import Counter
from dataclasses import dataclass, field, replace

import onnx
import onnx.inliner

from saccade.exporter.graph.canonical import tidy
from saccade.exporter.graph.cost import Count
from saccade.exporter.graph.layer_types import check_types, float32_layers, matrix_types
from saccade.exporter.graph.model_file import Weights
from saccade.plugins.contract import DOMAIN
from saccade.plugins.onnx_model import graphs_in


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same model without local functions and without the domain of custom ops.

    Nodes of a body are named after the node that called it: `<its name>/<operator>_<count>`.
    """
    called = {
        name: node.name
        for node in proto.graph.node
        if node.domain == DOMAIN
        for name in node.output
    }
    known = {node.name for node in proto.graph.node}
    flat = onnx.inliner.inline_local_functions(proto)
    _name(flat.graph, known, called)
    return tidy(flat)


def _name(graph: onnx.GraphProto, known: set[str], called: dict[str, str]) -> None:
    """Walk backwards, because a body's last nodes produce the outputs of the custom op."""
    counts: Counter[str] = Counter()
    caller = ""
    for node in reversed(graph.node):
        caller = next((called[name] for name in node.output if name in called), caller)
        if node.name and node.name in known:
            continue
        stem = f"{caller}/{node.op_type}"
        node.name = f"{stem}_{counts[stem]}"
        counts[stem] += 1
        for inner in graphs_in(node):
            _name_inside(inner, node.name)


def _name_inside(graph: onnx.GraphProto, place: str) -> None:
    for index, node in enumerate(graph.node):
        node.name = f"{place}/{node.op_type}_{index}"
        for inner in graphs_in(node):
            _name_inside(inner, node.name)


@dataclass(frozen=True)
class TypedGraph:
    """A graph with its cost, the layers that it keeps in float32, and its activation ranges."""

    proto: onnx.ModelProto
    count: Count
    weights: Weights  # the large ones, to which the graph refers
    float32_layers: tuple[str, ...] = ()
    activation_ranges: dict[str, float] = field(default_factory=dict)


def checked_graph(
    name: str,
    role: str,
    precision: str,
    proto: onnx.ModelProto,
    weights: Weights,
    ranges: dict[str, float],
    count: Count,
) -> TypedGraph:
    """Check that a narrower graph has its precision.

    Raises: SaccadeError if it would not have that precision.
    """
    kept = float32_layers(proto)
    # A slot decoder is one read-out: its softmax between slots amplifies rounding errors.
    cost = {} if role == "decode" else count.multiply_adds
    check_types(name, precision, matrix_types(proto), cost, kept)
    return TypedGraph(proto, count, weights, kept, ranges)


def with_ops_inlined(graph: TypedGraph, precision: str) -> TypedGraph:
    """Inline the custom ops of a graph; products inside them count as layers kept in float32."""
    proto = inlined(graph.proto)
    return replace(
        graph, proto=proto, float32_layers=() if precision == "fp32" else float32_layers(proto)
    )
