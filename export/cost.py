# SPDX-License-Identifier: Apache-2.0
"""What one sample costs, counted from the graph: no clock, no machine."""

import math
from collections import Counter
from collections.abc import Callable

import onnx
from onnx import shape_inference

from saccade.export.manifest import Cost, MultiplyAdds

Shape = tuple[int, ...]
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}


def cost_of(proto: onnx.ModelProto, parameters: int) -> Cost:
    """Multiply-adds by part and the peak of the activations, for a batch of one.

    Counted are MatMul, Gemm, Conv and Einsum of the main graph; a node's part is the first
    word of its name. The peak walks the nodes in file order: a tensor lives from its node to
    its last reader, inputs and outputs included, weights not; a reshape shares its input's
    memory. A runtime that fuses or plans otherwise needs less or more.
    Units:  multiply-adds and bytes, one sample.
    """
    single = _for_one_sample(proto)
    shapes, item_bytes = _shapes(single.graph)
    by_part: Counter[str] = Counter()
    for node in single.graph.node:
        if count := _COUNTS.get(node.op_type):
            by_part[node.name.split("/")[0]] += count(
                node, [shapes[name] for name in node.input if name], shapes[node.output[0]]
            )
    total = MultiplyAdds(sum(by_part.values()), dict(sorted(by_part.items())))
    return Cost(parameters, total, _peak_bytes(single.graph, shapes, item_bytes))


def _for_one_sample(proto: onnx.ModelProto) -> onnx.ModelProto:
    single = onnx.ModelProto()
    single.CopyFrom(proto)
    for value in (*single.graph.input, *single.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_value = 1
    return shape_inference.infer_shapes(single, strict_mode=True, data_prop=True)


def _shapes(graph: onnx.GraphProto) -> tuple[dict[str, Shape], dict[str, int]]:
    shapes: dict[str, Shape] = {}
    item_bytes: dict[str, int] = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        axes = kind.shape.dim
        assert all(axis.HasField("dim_value") for axis in axes), f"{value.name}: unknown shape"
        shapes[value.name] = tuple(axis.dim_value for axis in axes)
        item_bytes[value.name] = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    for tensor in graph.initializer:
        shapes[tensor.name] = tuple(tensor.dims)
    return shapes, item_bytes


def _attribute(node: onnx.NodeProto, name: str, default: int | str) -> int | str:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.s.decode() if attribute.s else attribute.i
    return default


def _matmul(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    return math.prod(output) * inputs[0][-1]


def _gemm(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    return math.prod(output) * inputs[0][0 if _attribute(node, "transA", 0) else 1]


def _conv(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    return math.prod(output) * math.prod(inputs[1][1:])


def _einsum(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    """One product of all letters: what the equation says, not how a runtime re-associates it."""
    equation = str(_attribute(node, "equation", "")).replace(" ", "").split("->")[0]
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.split(","), inputs, strict=True):
        sizes.update(zip(letters, shape, strict=True))
    return math.prod(sizes.values()) if len(inputs) > 1 else 0


_COUNTS: dict[str, Callable[[onnx.NodeProto, list[Shape], Shape], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Einsum": _einsum,
}


def _peak_bytes(
    graph: onnx.GraphProto, shapes: dict[str, Shape], item_bytes: dict[str, int]
) -> int:
    owner = {value.name: value.name for value in graph.input}
    for node in graph.node:
        for name in node.output:
            shared = node.op_type in _VIEWS and node.input[0] in owner
            owner[name] = owner[node.input[0]] if shared else name
    last_read = {owner[value.name]: len(graph.node) for value in graph.output}
    for index, node in enumerate(graph.node):
        for name in (*node.input, *node.output):
            if name in owner:
                last_read[owner[name]] = max(last_read.get(owner[name], 0), index)
    live = {value.name for value in graph.input}
    peak = 0
    for index, node in enumerate(graph.node):
        live |= {owner[name] for name in node.output if name}
        peak = max(peak, sum(math.prod(shapes[name]) * item_bytes[name] for name in live))
        live = {name for name in live if last_read[name] > index}
    return peak
