# SPDX-License-Identifier: Apache-2.0
"""ONNX files with custom ops: check nodes against their contracts, attach function bodies."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError, require
from saccade.plugins.contract import DOMAIN, VERSION
from saccade.plugins.ops import OPS

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 20, 10


def attach_bodies(proto: "onnx.ModelProto") -> None:
    """Attach a function body of standard operators for every `saccade` op that the graph calls.

    A runtime with the kernel ignores the body; any other runtime computes the same from it.

    Raises: SaccadeError for a node that breaks its contract, or an opset without bodies.
    """
    used = check_nodes(proto)
    opset = next(opset.version for opset in proto.opset_import if opset.domain == "")
    held = {function.name for function in proto.functions if function.domain == DOMAIN}
    for name in used:
        if name not in held:
            proto.functions.append(OPS[name].implementation("body")(opset))
    if used and not any(opset.domain == DOMAIN for opset in proto.opset_import):
        proto.opset_import.add(domain=DOMAIN, version=VERSION)


def check_nodes(proto: "onnx.ModelProto") -> tuple[str, ...]:
    """Check the `saccade` nodes of a graph and return their types, in alphabetical order.

    Raises: SaccadeError for an unknown op, a wrong number of inputs or outputs, an attribute
        that the op does not have or that is out of its range; the message names the node.
    """
    onnx = require("onnx", extra="export")
    used = set()
    for node in all_nodes(proto.graph):
        if node.domain != DOMAIN:
            continue
        where = f"{DOMAIN}::{node.op_type} (node {node.name!r})"
        check_one_of(f"{where}: the op", node.op_type, OPS)
        op = OPS[node.op_type]
        for ports, actual, kind in (
            (op.inputs, node.input, "inputs"),
            (op.outputs, node.output, "outputs"),
        ):
            if len(actual) != len(ports):
                raise SaccadeError(
                    f"{where}: has {len(actual)} {kind}, expected {len(ports)}: "
                    f"{', '.join(port.name for port in ports)}."
                )
        given = {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in node.attribute
        }
        op.checked_attributes(given, where)
        used.add(node.op_type)
    return tuple(sorted(used))


def all_nodes(graph: "onnx.GraphProto") -> Iterator["onnx.NodeProto"]:
    """Yield the nodes of a graph and of the graphs inside its nodes (Loop, If, Scan)."""
    for node in graph.node:
        yield node
        for inner in graphs_in(node):
            yield from all_nodes(inner)


def graphs_in(node: "onnx.NodeProto") -> "Iterator[onnx.GraphProto]":
    """Yield the graphs of a node: the body of a loop, the branches of a condition."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def set_nodes(graph: "onnx.GraphProto", nodes: "Iterable[onnx.NodeProto]") -> None:
    """Replace the nodes of a graph. They are copied first, because some may be its own."""
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
