# SPDX-License-Identifier: Apache-2.0
"""A model of one op, as tests and measurements of an op run it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from saccade.plugins.contract import DOMAIN, VERSION, Op
from saccade.plugins.onnx_model import IR_VERSION, OPSET, attach_bodies


def one_node_model(
    op: Op,
    dtype: str = "float32",
    attributes: Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    body: bool = True,
    opset: int = OPSET,
) -> onnx.ModelProto:
    """A model that holds one node of the op, its inputs and outputs named as the contract's ports.

    `axes` gives a port's axes as words and numbers ("b 14 14"); without it only the type is known,
    so any number of leading axes may be fed.

    Raises: SaccadeError for an attribute that the op does not have or that is out of its range.
    """
    values = op.defaults(attributes or {})

    def value_info(port: Any) -> Any:
        name = dtype if port.dtype == "T" else port.dtype
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name))
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
