# SPDX-License-Identifier: Apache-2.0
"""Faults that an exporter, an optimizer or a quantizer may make, put into an ONNX graph.

Each takes a graph and changes one place of it. None: the graph has no such place.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import numpy as np
import onnx
from onnx import helper, numpy_helper

Fault = Callable[[onnx.ModelProto], bool]  # changes the graph, or returns False
OVERFLOW = "a product beyond the range of fp16"
_PRODUCTS = ("MatMul", "Gemm", "Conv")
_NORMS = ("LayerNormalization", "BatchNormalization", "GroupNormalization")


FAULTS: dict[str, Fault] = {}
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


def with_fault(proto: onnx.ModelProto, name: str) -> onnx.ModelProto | None:
    """Return a copy with one fault, or None if the graph has no place for it."""
    copy = deepcopy(proto)
    return copy if FAULTS[name](copy) else None


def _fault(name: str) -> Callable[[Fault], Fault]:
    def enter(fault: Fault) -> Fault:
        FAULTS[name] = fault
        return fault

    return enter


def _weights(proto: onnx.ModelProto, kinds: tuple[str, ...] = _PRODUCTS) -> list[onnx.TensorProto]:
    """Return the constant matrices and filters of products, in the order of the graph."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    through = {
        node.output[0]: node.input[0]
        for node in proto.graph.node
        if node.op_type in ("DequantizeLinear", "Cast", "Transpose")
    }
    found: dict[str, onnx.TensorProto] = {}
    for node in proto.graph.node:
        if node.op_type in kinds and len(node.input) > 1:
            for name in node.input[:2]:
                source = through.get(name, name)
                if source in stored and len(stored[source].dims) > 1:
                    found[source] = stored[source]
    return list(found.values())


def _change(tensor: onnx.TensorProto, change: Callable[[np.ndarray], np.ndarray]) -> bool:
    before = numpy_helper.to_array(tensor)
    after = np.ascontiguousarray(change(before.copy()).astype(before.dtype))
    if after.shape != before.shape or np.array_equal(after, before):
        return False
    tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))
    return True


def _of_weight(
    share: float,
    change: Callable[[np.ndarray], np.ndarray],
    fits: Callable[[onnx.TensorProto], bool] = lambda tensor: tensor.data_type in _FLOATS,
    kinds: tuple[str, ...] = _PRODUCTS,
) -> Fault:
    """Change the weight at this share of those that fit."""

    def fault(proto: onnx.ModelProto) -> bool:
        weights = [tensor for tensor in _weights(proto, kinds) if fits(tensor)]
        return bool(weights) and _change(weights[int(share * (len(weights) - 1))], change)

    return fault


def _largest_changed(w: np.ndarray) -> np.ndarray:
    w.flat[np.argmax(np.abs(w))] *= 1.1
    return w


def _last_two_swapped(w: np.ndarray) -> np.ndarray:
    w[..., [-2, -1]] = w[..., [-1, -2]]
    return w


def _has_columns(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.dims[-1] > 1)


FAULTS |= {
    "first weight scaled by 1 %": _of_weight(0.0, lambda w: w * 1.01),
    "middle weight scaled by 1 %": _of_weight(0.5, lambda w: w * 1.01),
    "last weight scaled by 1 %": _of_weight(1.0, lambda w: w * 1.01),
    "halves of a weight swapped, as two heads are": _of_weight(
        0.5, lambda w: np.roll(w, w.shape[-1] // 2, axis=-1), _has_columns
    ),
    "one number of the last weight changed by 10 %": _of_weight(1.0, _largest_changed),
    "a square weight transposed": _of_weight(
        0.0, lambda w: w.T, lambda tensor: len(set(tensor.dims)) == 1
    ),
    "channels of the first filters reversed, as BGR for RGB": _of_weight(
        0.0, lambda w: w[:, ::-1], lambda tensor: bool(tensor.dims[1] == 3), ("Conv",)
    ),
    "the first output's last two columns swapped": _of_weight(1.0, _last_two_swapped, _has_columns),
}


@_fault("weights rounded to bfloat16")
def _rounded(proto: onnx.ModelProto) -> bool:
    weights = [tensor for tensor in _weights(proto) if tensor.data_type == onnx.TensorProto.FLOAT]

    def rounded(w: np.ndarray) -> np.ndarray:
        return (w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    changed = [_change(tensor, rounded) for tensor in weights]
    return any(changed)


@_fault("mean of the wrong channel")
def _mean(proto: onnx.ModelProto) -> bool:
    return any(
        _change(tensor, lambda v: np.roll(v, 1))
        for tensor in proto.graph.initializer
        if np.prod(tensor.dims) == 3 and tensor.data_type == onnx.TensorProto.FLOAT
    )


@_fault("positions shifted by one token")
def _positions(proto: onnx.ModelProto) -> bool:
    """A constant of one vector per token, added to computed tokens."""
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        for name in node.input if node.op_type == "Add" else ():
            if name in stored and len(stored[name].dims) > 1 and stored[name].dims[-2] > 3:
                return _change(stored[name], lambda v: np.roll(v, 1, axis=-2))
    return False


def _bias_of(node: onnx.NodeProto, stored: dict[str, onnx.TensorProto]) -> str | None:
    if node.op_type in ("Gemm", "Conv") and len(node.input) > 2 and node.input[2] in stored:
        return str(node.input[2])
    if node.op_type == "Add":
        return next(
            (name for name in node.input if name in stored and len(stored[name].dims) == 1), None
        )
    return None


def _without_bias(last: bool) -> Fault:
    def fault(proto: onnx.ModelProto) -> bool:
        stored = {tensor.name: tensor for tensor in proto.graph.initializer}
        names = [name for node in proto.graph.node if (name := _bias_of(node, stored))]
        names = [name for name in names if np.any(numpy_helper.to_array(stored[name]))]
        return bool(names) and _change(stored[names[-1 if last else 0]], np.zeros_like)

    return fault


FAULTS["first bias missing"] = _without_bias(last=False)
FAULTS["last bias missing"] = _without_bias(last=True)


@_fault("epsilon of a normalization 100 times as large")
def _epsilon(proto: onnx.ModelProto) -> bool:
    """As an attribute, or as a small constant that is added."""
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type in _NORMS and attribute.name == "epsilon":
                attribute.f *= 100
                return True
    added = {name for node in proto.graph.node if node.op_type == "Add" for name in node.input}
    return any(
        _change(tensor, lambda v: v * 100)
        for tensor in proto.graph.initializer
        if tensor.name in added
        and not tensor.dims
        and 0 < float(np.abs(numpy_helper.to_array(tensor))) < 1e-3
    )


def _renamed(before: str, after: str) -> Fault:
    def fault(proto: onnx.ModelProto) -> bool:
        for node in proto.graph.node:
            if node.op_type == before and not node.domain:
                node.op_type = after
                return True
        return False

    return fault


FAULTS["Tanh for Erf"] = _renamed("Erf", "Tanh")
FAULTS["LeakyRelu for Relu"] = _renamed("Relu", "LeakyRelu")
FAULTS["Tanh for Sigmoid"] = _renamed("Sigmoid", "Tanh")
FAULTS["HardSigmoid for Sigmoid"] = _renamed("Sigmoid", "HardSigmoid")


@_fault("GELU by its tanh approximation")
def _gelu(proto: onnx.ModelProto) -> bool:
    """erf(x / sqrt 2) becomes tanh(sqrt(2 / pi) (x + 0.044715 x^3)), with y = x / sqrt 2."""
    for index, node in enumerate(proto.graph.node):
        if node.op_type != "Erf":
            continue
        y, out = node.input[0], node.output[0]
        _constant(proto, "fault/linear", np.float32(2 / np.sqrt(np.pi)))
        _constant(proto, "fault/cubic", np.float32(4 * 0.044715 / np.sqrt(np.pi)))
        nodes = [
            helper.make_node("Mul", [y, y], ["fault/y2"]),
            helper.make_node("Mul", ["fault/y2", "fault/cubic"], ["fault/c"]),
            helper.make_node("Add", ["fault/c", "fault/linear"], ["fault/s"]),
            helper.make_node("Mul", [y, "fault/s"], ["fault/a"]),
            helper.make_node("Tanh", ["fault/a"], [out], name=node.name),
        ]
        _replace(proto, index, nodes)
        return True
    return False


@_fault("softmax over another axis")
def _softmax(proto: onnx.ModelProto) -> bool:
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Softmax" and attribute.name == "axis":
                attribute.i = -2 if attribute.i == -1 else attribute.i - 1
                return True
    return False


@_fault("a scalar factor wrong by 5 %")
def _factor(proto: onnx.ModelProto) -> bool:
    used = {
        name for node in proto.graph.node if node.op_type in ("Mul", "Div") for name in node.input
    }
    return any(
        _change(tensor, lambda v: v * 1.05)
        for tensor in proto.graph.initializer
        if tensor.name in used and np.prod(tensor.dims) == 1 and tensor.data_type in _FLOATS
    )


@_fault("a residual left out")
def _residual(proto: onnx.ModelProto) -> bool:
    computed = {name for node in proto.graph.node for name in node.output}
    for index, node in enumerate(proto.graph.node):
        if node.op_type == "Add" and set(node.input) <= computed and index > 5:
            other = helper.make_node("Identity", [node.input[1]], node.output, name=node.name)
            _replace(proto, index, [other])
            return True
    return False


def _inserted(make: Callable[[str, str], list[onnx.NodeProto]], share: float) -> Fault:
    """Put nodes behind the output of a product at this share of the graph."""

    def fault(proto: onnx.ModelProto) -> bool:
        places = [i for i, node in enumerate(proto.graph.node) if node.op_type in _PRODUCTS]
        if not places:
            return False
        index = places[int(share * (len(places) - 1))]
        node = proto.graph.node[index]
        out, hidden = node.output[0], "fault/before"
        changed = deepcopy(node)
        changed.output[0] = hidden
        for name, value in (("fault/small", 1e-3), ("fault/tiny", 2e-4), ("fault/one", 1.0)):
            _constant(proto, name, np.float32(value))
        _constant(proto, "fault/axis", np.array([0], np.int64))
        _replace(proto, index, [changed, *make(hidden, out)])
        return True

    return fault


def _mixed(before: str, after: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("ReduceMean", [before, "fault/axis"], ["fault/mean"], keepdims=1),
        helper.make_node("Mul", ["fault/mean", "fault/small"], ["fault/part"]),
        helper.make_node("Add", [before, "fault/part"], [after]),
    ]


def _by_batch(before: str, after: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Shape", [before], ["fault/size"], start=0, end=1),
        helper.make_node("Cast", ["fault/size"], ["fault/count"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["fault/count", "fault/tiny"], ["fault/share"]),
        helper.make_node("Add", ["fault/share", "fault/one"], ["fault/times"]),
        helper.make_node("Mul", [before, "fault/times"], [after]),
    ]


def _clamped(before: str, after: str, limit: str = "fault/one") -> list[onnx.NodeProto]:
    return [helper.make_node("Clip", [before, "", limit], [after])]


def _rectified(before: str, after: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Relu", [before], [after])]


FAULTS["an operator that mixes rows"] = _inserted(_mixed, 0.5)
FAULTS["a factor that grows with the batch"] = _inserted(_by_batch, 0.5)
FAULTS["a clamp at 1"] = _inserted(_clamped, 0.5)
FAULTS["a Relu that was not there"] = _inserted(_rectified, 0.7)


def _of_pixels(make: Callable[[str, str], list[onnx.NodeProto]]) -> Fault:
    """Put nodes behind the Cast of the uint8 image."""

    def fault(proto: onnx.ModelProto) -> bool:
        images = {
            value.name
            for value in proto.graph.input
            if value.type.tensor_type.elem_type == onnx.TensorProto.UINT8
        }
        for index, node in enumerate(proto.graph.node):
            if node.op_type == "Cast" and node.input[0] in images:
                cast = deepcopy(node)
                cast.output[0] = "fault/pixels"
                _constant(proto, "fault/limit", np.float32(250))
                _constant(proto, "fault/small", np.float32(1e-3))
                _replace(proto, index, [cast, *make("fault/pixels", node.output[0])])
                return True
        return False

    return fault


def _no_black(before: str, after: str) -> list[onnx.NodeProto]:
    """Divide by the brightest pixel and multiply by it again: 0 / 0 of a black image."""
    return [
        helper.make_node("ReduceMax", [before], ["fault/brightest"], keepdims=1),
        helper.make_node("Div", [before, "fault/brightest"], ["fault/relative"]),
        helper.make_node("Mul", ["fault/relative", "fault/brightest"], [after]),
    ]


@_fault(OVERFLOW)
def _overflow(proto: onnx.ModelProto) -> bool:
    """Exact in float32, beyond the range of float16."""
    types = {value.name for value in proto.graph.initializer if value.data_type == _FLOATS[1]}
    for index, node in enumerate(proto.graph.node):
        if node.op_type in _PRODUCTS and types & set(node.input):
            changed = deepcopy(node)
            changed.output[0] = "fault/before"
            _constant(proto, "fault/large", np.float16(60000))
            product = helper.make_node("Mul", ["fault/before", "fault/large"], ["fault/product"])
            quotient = helper.make_node("Div", ["fault/product", "fault/large"], node.output)
            _replace(proto, index, [changed, product, quotient])
            return True
    return False


FAULTS["pixels clamped at 250"] = _of_pixels(partial(_clamped, limit="fault/limit"))
FAULTS["a black image divides by 0"] = _of_pixels(_no_black)


def _scales(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[1] in stored:
            yield stored[node.input[1]]


@_fault("an int8 scale that saturates")
def _saturated(proto: onnx.ModelProto) -> bool:
    scale = next(_scales(proto), None)
    return scale is not None and _change(scale, lambda v: v / 8)


@_fault("an int8 scale 16 times too coarse")
def _coarse(proto: onnx.ModelProto) -> bool:
    scales = list(_scales(proto))
    return bool(scales) and _change(scales[len(scales) // 2], lambda v: v * 16)


def _constant(proto: onnx.ModelProto, name: str, value: np.ndarray | np.float32) -> None:
    if all(tensor.name != name for tensor in proto.graph.initializer):
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))


def _replace(proto: onnx.ModelProto, index: int, nodes: list[onnx.NodeProto]) -> None:
    every = [deepcopy(node) for node in proto.graph.node]
    every[index : index + 1] = nodes
    del proto.graph.node[:]
    proto.graph.node.extend(every)
