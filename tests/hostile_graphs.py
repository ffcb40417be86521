# SPDX-License-Identifier: Apache-2.0
"""ONNX files that cost their reader far more than their own size, each in a different way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tiny_artefacts import onnx_model

DOMAIN = "bomb"
TRIPS = 2**62


def doubling(levels: int = 28) -> onnx.ModelProto:
    """Functions that each call the next one twice: 2^levels nodes."""
    model = onnx_model()
    for level in range(levels):
        below = (f"f{level - 1}", DOMAIN) if level else ("Identity", "")
        _function(model, f"f{level}", below)
    _call(model, f"f{levels - 1}")
    return model


def recursive() -> onnx.ModelProto:
    """Two functions that call each other."""
    model = onnx_model()
    _function(model, "f0", ("f1", DOMAIN))
    _function(model, "f1", ("f0", DOMAIN))
    _call(model, "f0")
    return model


def looping(trips: int = TRIPS, levels: int = 1) -> onnx.ModelProto:
    """A loop that practically never ends; with levels, a loop inside a loop."""
    model = onnx_model()
    model.graph.initializer.append(numpy_helper.from_array(np.array(trips), "trips"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    node = helper.make_node("Identity", ["carried_0"], ["next_0"], name="inner")
    for level in range(levels):
        graph = helper.make_graph(
            [node, helper.make_node("Identity", [f"on_{level}"], [f"still_{level}"])],
            f"body{level}",
            [
                helper.make_tensor_value_info(f"round_{level}", TensorProto.INT64, []),
                helper.make_tensor_value_info(f"on_{level}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"carried_{level}", TensorProto.FLOAT, None),
            ],
            [
                helper.make_tensor_value_info(f"still_{level}", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"next_{level}", TensorProto.FLOAT, None),
            ],
        )
        outer = "logits" if level == levels - 1 else f"carried_{level + 1}"
        after = "looped" if level == levels - 1 else f"next_{level + 1}"
        inputs = ["trips", "yes", outer]
        node = helper.make_node("Loop", inputs, [after], name=f"loop{level}", body=graph)
    model.graph.node.insert(len(model.graph.node) - 1, node)
    model.graph.node[-1].input[0] = "looped"
    return model


def read_trips() -> onnx.ModelProto:
    """A loop whose number of iterations a node computes, so that it is unknown without a run."""
    model = looping()
    (trips,) = (tensor for tensor in model.graph.initializer if tensor.name == "trips")
    trips.name = "most"
    node = helper.make_node("Identity", ["most"], ["trips"], name="trips")
    model.graph.node.insert(0, node)
    return model


def external() -> onnx.ModelProto:
    """Weights in a second file, which no hash covers."""
    model = onnx_model()
    _external(model.graph.initializer[0])
    return model


def external_in_constant() -> onnx.ModelProto:
    """The same in a node's attribute, which is checked less often."""
    model = onnx_model()
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "hidden")
    _external(tensor)
    _function(model, "f0", ("Identity", ""))
    node = helper.make_node("Constant", [], ["c"], value=tensor)
    model.functions[0].node.append(node)
    _call(model, "f0")
    return model


def claims_more_than_it_holds(rows: int = 10**13) -> onnx.ModelProto:
    """A weight that claims this many rows of four, with the data of 16 rows."""
    model = onnx_model()
    model.graph.initializer[0].dims[:] = [rows, 4]
    return model


def filled(size: int = 10**13) -> onnx.ModelProto:
    """A node of a few bytes that produces 10^13 numbers, a constant that a runtime folds."""
    model = onnx_model()
    shape = numpy_helper.from_array(np.array([size]), "much")
    model.graph.initializer.append(shape)
    added = [
        helper.make_node("ConstantOfShape", ["much"], ["full"], name="full"),
        helper.make_node("ReduceSum", ["full"], ["sum"], name="sum", keepdims=0),
        helper.make_node("Add", ["logits", "sum"], ["added"], name="added"),
    ]
    for node in added:
        model.graph.node.insert(len(model.graph.node) - 1, node)
    model.graph.node[-1].input[0] = "added"
    return model


def many_axes(axes: int = 400) -> onnx.ModelProto:
    """A weight with 400 axes of one."""
    model = onnx_model()
    model.graph.initializer.append(helper.make_tensor("thin", TensorProto.FLOAT, [1] * axes, [1.0]))
    return model


def short_half() -> onnx.ModelProto:
    """A half-precision weight of four numbers with the data of one, stored as a number."""
    model = onnx_model()
    thin = onnx.TensorProto(name="thin", data_type=TensorProto.FLOAT16, dims=[4], int32_data=[1])
    model.graph.initializer.append(thin)
    return model


def long_name() -> onnx.ModelProto:
    """A node whose name would fill the screen in every message about it."""
    model = onnx_model()
    model.graph.node[0].name = "x" * 100_000
    return model


def escapes_in_names() -> onnx.ModelProto:
    """A node whose name clears the reader's terminal."""
    model = onnx_model()
    model.graph.node[0].name = "\x1b[2J\x1b]0;owned\x07"
    return model


def name_of_bytes() -> onnx.ModelProto:
    """A node whose name is not text: protobuf returns bytes instead of a string."""
    data = onnx_model().SerializeToString().replace(b"softmax", b"soft\xff\xfex")
    model: onnx.ModelProto = onnx.load_model_from_string(data)
    return model


HOSTILE: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "weights in a second file": (external, "another file"),
    "a constant in a second file": (external_in_constant, "another file"),
    "a weight that claims 1e13 numbers": (claims_more_than_it_holds, "numbers"),
    "a weight of fewer bytes than it says": (lambda: claims_more_than_it_holds(5), "256 bytes"),
    "400 axes": (many_axes, "400 axes"),
    "a long name": (long_name, "characters"),
    "a name of bytes": (name_of_bytes, "is not text"),
    "escapes in a name": (escapes_in_names, "control"),
}  # and what the message has to contain
COSTLY: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "functions that double": (doubling, "CPU time"),
    "functions that call each other": (recursive, "not a valid ONNX file"),
    "a loop of 2^62": (looping, "CPU time"),
    "loops in loops": (lambda: looping(3_000, 4), "CPU time"),
    "a loop of a computed length": (read_trips, "CPU time"),
    "1e13 numbers from a few bytes": (filled, "more memory"),
    "a half-precision weight with too few numbers": (short_half, "not a valid ONNX file"),
}  # the same of what the worker finds


def write(path: Path, model: onnx.ModelProto) -> bytes:
    """Write the model to `path` and return its bytes."""
    data: bytes = model.SerializeToString()
    path.write_bytes(data)
    return data


def _function(model: onnx.ModelProto, name: str, callee: tuple[str, str]) -> None:
    operator, domain = callee
    nodes = [
        helper.make_node(operator, ["x"], ["m"], domain=domain),
        helper.make_node(operator, ["m"], ["y"], domain=domain),
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model.functions.append(helper.make_function(DOMAIN, name, ["x"], ["y"], nodes, opsets))


def _call(model: onnx.ModelProto, name: str) -> None:
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    node = helper.make_node(name, ["logits"], ["called"], domain=DOMAIN, name="call")
    model.graph.node.insert(len(model.graph.node) - 1, node)
    model.graph.node[-1].input[0] = "called"


def _external(tensor: onnx.TensorProto) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
