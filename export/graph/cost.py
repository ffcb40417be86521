# SPDX-License-Identifier: Apache-2.0
"""Compute the cost of one sample from the graph, independent of any machine."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from saccade.exporter.artefact.manifest import Cost, MultiplyAdds
from saccade.exporter.graph.half_graph import HALF, widened
from saccade.exporter.graph.layer_types import element_types
from saccade.exporter.graph.model_file import Load, graph_session
from saccade.exporter.graph.samples import random_inputs
from saccade.models.interface import Arrays

Shape = tuple[int, ...]
_TRACED = 3  # samples, as many as tracing needs
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}


@dataclass(frozen=True)
class Count:
    """The work of a graph for one sample.

    Units: multiply-adds by node of the main graph; the peak of activations in bytes.
    """

    multiply_adds: dict[str, int]
    peak_activation_bytes: int

    def cost(self, parameters: int) -> Cost:
        """Return the manifest's entry; a node's part is the first segment of its name."""
        by_part: Counter[str] = Counter()
        for name, count in self.multiply_adds.items():
            by_part[name.split("/")[0]] += count
        total = MultiplyAdds(sum(by_part.values()), dict(sorted(by_part.items())))
        return Cost(parameters, total, self.peak_activation_bytes)


def cost_of(proto: onnx.ModelProto, parameters: int, samples: Arrays) -> Cost:
    """Return the manifest's entry for a graph, counted by `count_of`."""
    return count_of(proto, samples).cost(parameters)


def count_of(
    proto: onnx.ModelProto, samples: Arrays, weights: Mapping[str, Load] | None = None
) -> Count:
    """Count multiply-adds by node and the peak size of activations, for a batch of one.

    MatMul, Gemm, Conv, ConvTranspose, Einsum and LSTM of the main graph are counted, but not the
    inside of custom ops and loops. The peak assumes that nodes run in file order and that a tensor
    lives from its node to its last reader. It includes inputs and outputs but not weights, also as
    int8 widens them, and a reshape shares its input's memory. A runtime that fuses nodes or plans
    memory differently needs less or more.

    Units: one sample, the first of `samples`.
    """
    shapes, item_bytes = _shapes(proto, samples, weights)
    multiply_adds = {
        node.name: _COUNTS[node.op_type](
            node, [shapes[name] for name in node.input if name], shapes[node.output[0]]
        )
        for node in proto.graph.node
        if node.op_type in _COUNTS
    }
    return Count(multiply_adds, _peak_bytes(proto.graph, shapes, item_bytes))


def parameters_of(model: Any) -> int:
    """Count the learned parameters of a model, each once."""
    return sum(parameter.numel() for parameter in model.parameters())


def cost_of_size(family: str, name: str) -> dict[str, Any]:
    """Count parameters and multiply-adds per sample by component, for the largest default variant.

    The weights are random.
    Raises: SaccadeError if there is no such family or size.
    """
    from saccade.exporter.graph.tracing import trace_component
    from saccade.models.catalogue import preset_of
    from saccade.models.families import build

    model: Any = build(family, preset_of(family, name).to_dict()).eval()
    parameters = parameters_of(model)
    folded = model.at(model.budgets()[0]).fold().float()
    counts = {}
    for component in folded.components():
        inputs = random_inputs(component, np.random.default_rng(0), _TRACED)
        proto = trace_component(folded, component, inputs, component.outputs)
        counts[component.role] = sum(count_of(proto, inputs).multiply_adds.values())
    return {"parameters": parameters, "multiply_adds": counts}


def _shapes(
    proto: onnx.ModelProto, samples: Arrays, weights: Mapping[str, Load] | None
) -> tuple[dict[str, Shape], dict[str, int]]:
    """Shape and item size of every tensor: inferred, or else from a run, which covers loops."""
    given = {value.name: samples[value.name][:1] for value in proto.graph.input}
    known = _inferred(proto, given)
    unknown = [
        name for node in proto.graph.node for name in node.output if name and name not in known
    ]
    if unknown:
        graph, wide = widened(proto, weights)
        del graph.graph.output[:]
        graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in unknown)
        values = graph_session(graph, wide, in_order=True).run(unknown, given)
        types = element_types(proto)
        for name, value in zip(unknown, values, strict=True):
            known[name] = value.shape, 2 if types.get(name) in HALF else value.itemsize
    return (
        {name: shape for name, (shape, _) in known.items()},
        {name: size for name, (_, size) in known.items()},
    )


def _inferred(proto: onnx.ModelProto, given: Arrays) -> dict[str, tuple[Shape, int]]:
    """Infer shapes and item sizes for inputs of these shapes; some remain unknown."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for value in fixed.graph.input:
        axes = value.type.tensor_type.shape.dim
        for axis, size in zip(axes, given[value.name].shape, strict=True):
            axis.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    known = {
        tensor.name: ((*tensor.dims,), _item_bytes(tensor.data_type))
        for tensor in graph.initializer
    }
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        axes = kind.shape.dim
        if kind.HasField("shape") and all(axis.HasField("dim_value") for axis in axes):
            known[value.name] = (*(axis.dim_value for axis in axes),), _item_bytes(kind.elem_type)
    return known


def _item_bytes(kind: int) -> int:
    return int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


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


def _conv_transpose(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    return math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _lstm(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    """Each step multiplies by the weights of the input and of the state, in every direction."""
    steps, batch = inputs[0][:2]
    return steps * batch * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _einsum(node: onnx.NodeProto, inputs: list[Shape], output: Shape) -> int:
    """One product over all letters, as the equation says, not as a runtime reorders it."""
    equation = str(_attribute(node, "equation", "")).replace(" ", "").split("->")[0]
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.split(","), inputs, strict=True):
        sizes.update(zip(letters, shape, strict=True))
    return math.prod(sizes.values()) if len(inputs) > 1 else 0


_COUNTS: dict[str, Callable[[onnx.NodeProto, list[Shape], Shape], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "LSTM": _lstm,
    "Einsum": _einsum,
}


def _peak_bytes(
    graph: onnx.GraphProto, shapes: dict[str, Shape], item_bytes: dict[str, int]
) -> int:
    owner = {value.name: value.name for value in graph.input}
    for node in graph.node:
        # int8 widens its weights on paper: a runtime keeps them narrow or widens them on loading.
        if node.op_type == "DequantizeLinear" and node.input[0] not in owner:
            continue
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
        live |= {owner[name] for name in node.output if name in owner}
        peak = max(peak, sum(math.prod(shapes[name]) * item_bytes[name] for name in live))
        live = {name for name in live if last_read[name] > index}
    return peak
