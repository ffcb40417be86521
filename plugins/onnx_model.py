# SPDX-License-Identifier: Apache-2.0
"""ONNX files that use the ops: nodes checked against their contract, function bodies attached."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError, require
from saccade.plugins.contract import DOMAIN, VERSION, Op
from saccade.plugins.ops import OPS

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 20, 10


def attach_bodies(proto: "onnx.ModelProto") -> None:
    """Give every op of domain `saccade` that the graph calls its body of standard operators.

    A runtime with the kernel ignores the body, one without it computes the same from it.

    Raises: SaccadeError for a node that breaks its contract, or an opset that bodies lack.
    """
    used = check_nodes(proto)
    opset = next(each.version for each in proto.opset_import if each.domain == "")
    held = {function.name for function in proto.functions if function.domain == DOMAIN}
    for name in used:
        if name not in held:
            proto.functions.append(OPS[name].implementation("body")(opset))
    if used and not any(each.domain == DOMAIN for each in proto.opset_import):
        proto.opset_import.add(domain=DOMAIN, version=VERSION)


def check_nodes(proto: "onnx.ModelProto") -> tuple[str, ...]:
    """The node types of domain `saccade` that the graph calls, in alphabetical order.

    Raises: SaccadeError for an unknown op, a wrong number of inputs or outputs, an attribute
        that the op does not have or that is out of its range; the message names the node.
    """
    onnx = require("onnx", extra="export")
    used = set()
    for node in all_nodes(proto.graph):
        if node.domain != DOMAIN:
            continue
        where = f"{DOMAIN}::{node.op_type} (node {node.name!r})"
        if node.op_type not in OPS:
            raise SaccadeError(f"{where}: no such op. There are: {', '.join(OPS)}.")
        op = OPS[node.op_type]
        for ports, found, kind in (
            (op.inputs, node.input, "inputs"),
            (op.outputs, node.output, "outputs"),
        ):
            if len(found) != len(ports):
                raise SaccadeError(
                    f"{where}: {len(found)} {kind}, expected {len(ports)}: "
                    f"{', '.join(port.name for port in ports)}."
                )
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        op.checked_attributes(given, where)
        used.add(node.op_type)
    return tuple(sorted(used))


def all_nodes(graph: "onnx.GraphProto") -> Iterator["onnx.NodeProto"]:
    """The nodes of a graph, and of the graphs inside its nodes (Loop, If, Scan)."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from all_nodes(inner)


def one_node_model(
    op: Op,
    dtype: str = "float32",
    attributes: Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    body: bool = True,
    opset: int = OPSET,
) -> "onnx.ModelProto":
    """A model that holds one node of the op, its inputs and outputs named as the contract's ports.

    `axes` gives a port's axes as words and numbers ("b 14 14"); without it only the type is known,
    so any number of leading axes may be fed.

    Raises: SaccadeError for an attribute that the op does not have or that is out of its range.
    """
    onnx = require("onnx", extra="export")
    values = op.defaults(attributes or {})

    def value_info(port: Any) -> Any:
        name = dtype if port.dtype == "T" else port.dtype
        kind = onnx.helper.np_dtype_to_tensor_dtype(onnx.numpy_helper.np.dtype(name))
        words = (axes or {}).get(port.name)
        shape = None if words is None else [int(w) if w.isdigit() else w for w in words.split()]
        return onnx.helper.make_tensor_value_info(port.name, kind, shape)

    node = onnx.helper.make_node(
        op.node,
        [port.name for port in op.inputs],
        [port.name for port in op.outputs],
        name=op.reference.__name__,
        domain=DOMAIN,
        **values,
    )
    graph = onnx.helper.make_graph(
        [node],
        op.reference.__name__,
        [value_info(port) for port in op.inputs],
        [value_info(port) for port in op.outputs],
    )
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    if body:
        attach_bodies(proto)
    return proto
