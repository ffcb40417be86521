# SPDX-License-Identifier: Apache-2.0
"""Custom ops written out as the standard operators of their bodies, for tools without functions."""

from collections import Counter

import onnx
import onnx.inliner

from saccade.export.graph.canonical import tidy
from saccade.plugins.contract import DOMAIN


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without a local function, and without the domain of the custom ops.

    The nodes of a body are named after the node that called it: `<its name>/<operator>_<count>`.
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
    """Walks backwards: a body's last nodes make what the custom op made."""
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
