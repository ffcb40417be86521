# SPDX-License-Identifier: Apache-2.0
"""From saccade's torch operators to nodes of its ONNX domain, for torch's exporter."""

from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch

from saccade.plugins.contract import DOMAIN, DTYPES, VERSION, Op, Port
from saccade.plugins.ops import OPS


def translations() -> dict[Any, Callable[..., Any]]:
    """A translation for each op: one torch operator, one node, the same arguments."""
    table = {}
    for op in OPS.values():
        op.implementation("eager")  # registers the torch operator
        python_name = op.reference.__name__
        table[getattr(torch.ops.saccade, python_name).default] = _translation(op)
    return table


def _translation(op: Op) -> Callable[..., Any]:
    node = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), op.node, _schema(op))
    count = len(op.inputs)

    def translate(*arguments: Any, **given: Any) -> Any:
        # torch passes attributes by position where the caller did.
        positional = dict(zip(op.attributes, arguments[count:], strict=False))
        values = op.checked_attributes({**positional, **given}, where=op.name)
        return node(*arguments[:count], **values)

    return translate


def _schema(op: Op) -> onnx.defs.OpSchema:
    """Registered nowhere; it only tells the exporter the node's shape."""
    schema = onnx.defs.OpSchema
    types = {"float32": "tensor(float)", "float16": "tensor(float16)", "float64": "tensor(double)"}
    fixed = {**types, "int64": "tensor(int64)"}

    def parameter(port: Port) -> Any:
        return schema.FormalParameter(port.name, "T" if port.dtype == "T" else fixed[port.dtype])

    return schema(
        op.node,
        DOMAIN,
        VERSION,
        inputs=[parameter(port) for port in op.inputs],
        outputs=[parameter(port) for port in op.outputs],
        type_constraints=[("T", [types[each] for each in DTYPES], "")],
        attributes=[
            schema.Attribute(
                each.name,
                schema.AttrType.FLOAT if each.kind is float else schema.AttrType.INT,
                required=False,
            )
            for each in op.attributes.values()
        ],
    )
