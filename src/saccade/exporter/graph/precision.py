# SPDX-License-Identifier: Apache-2.0
"""Make the graph of a component in one precision, and verify the precision."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import onnx
import onnx.inliner

from saccade.exporter.graph.canonical import tidy
from saccade.exporter.graph.cost import Count, count_of
from saccade.exporter.graph.half_graph import activation_ranges, check_ranges
from saccade.exporter.graph.int8_graph import quantized, quantized_ranges
from saccade.exporter.graph.layer_types import check_types, float32_layers, matrix_types
from saccade.exporter.graph.samples import GateSizes
from saccade.models.interface import Arrays
from saccade.plugins.contract import DOMAIN


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
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _name_inside(inner, node.name)


def _name_inside(graph: onnx.GraphProto, place: str) -> None:
    for index, node in enumerate(graph.node):
        node.name = f"{place}/{node.op_type}_{index}"
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _name_inside(inner, node.name)


@dataclass(frozen=True)
class TypedGraph:
    """A graph with its cost, the layers that it keeps in float32, and its activation ranges."""

    proto: onnx.ModelProto
    count: Count
    float32_layers: tuple[str, ...] = ()
    activation_ranges: dict[str, float] = field(default_factory=dict)


_INT8_SAMPLES = 64  # at least, where the gate itself takes fewer


def typed_graph(
    name: str,
    role: str,
    precision: str,
    traced: Callable[[str], onnx.ModelProto],
    few: Arrays,
    calibration: Callable[[int], Arrays],
    sizes: Callable[[int], GateSizes],
) -> TypedGraph:
    """Make the graph of one component of a folded float32 model in `precision`.

    `traced` returns the component's graph in fp32, fp16 or bf16. In narrower precisions, read-outs,
    softmax, normalizations and custom ops stay in float32. Scales and ranges are measured on
    calibration samples: `calibration` returns that many of them, `sizes` the gate's for a cost.

    Shapes: few as the graph's inputs, [n ...] of any samples.
    Raises: GateFailed if a number is too large for fp16, SaccadeError if the graph would not have
        that precision.
    """
    proto = traced("fp32" if precision == "int8" else precision)
    count = count_of(proto, few)
    if precision == "fp32":
        return TypedGraph(proto, count)
    gate = sizes(sum(count.multiply_adds.values()))
    samples = gate.real_inputs
    if precision == "int8":
        samples = samples if gate.score_s is None else max(_INT8_SAMPLES, samples)
        # The half-precision graph tells which products are in read-outs: nodes have the same names.
        proto = quantized(proto, calibration(samples), float32_layers(traced("fp16")))
        ranges, count = quantized_ranges(proto), count_of(proto, few)
    else:
        ranges = activation_ranges(proto, calibration(samples))
        if precision == "fp16":
            check_ranges(name, ranges)
    kept = float32_layers(proto)
    # A slot decoder is one read-out: its softmax between slots amplifies rounding errors.
    cost = {} if role == "decode" else count.multiply_adds
    check_types(name, precision, matrix_types(proto), cost, kept)
    return TypedGraph(proto, count, kept, ranges)


def with_ops_inlined(graph: TypedGraph, precision: str) -> TypedGraph:
    """Inline the custom ops of a graph; products inside them count as layers kept in float32."""
    proto = inlined(graph.proto)
    return replace(
        graph, proto=proto, float32_layers=() if precision == "fp32" else float32_layers(proto)
    )
