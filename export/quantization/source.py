# SPDX-License-Identifier: Apache-2.0
"""The float32 model on disk that is quantized: its layers, and smoothing of their inputs."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, helper, numpy_helper

from saccade.core.errors import SaccadeError
from saccade.exporter.graph.weights import Weights, put_back
from saccade.exporter.quantization.ranges import Activation, Extremes
from saccade.plugins.onnx_model import set_nodes

_DATA = "weights.data"
_SMALL_BYTES = 1024  # smaller weights stay in the graph: shape inference reads shapes from there
# SmoothQuant's strength: 0 leaves all outliers in the activations, 1 moves all into the weights.
_STRENGTH = 0.5


@dataclass(frozen=True)
class Layer:
    """A node with one constant matrix or constant filters."""

    node: str
    input: Activation
    weight: str
    output: Activation
    channels: int  # axis of the weight that has the output's channels


@dataclass(frozen=True)
class QuantizationSource:
    """A float32 graph whose large weights stay in a data file beside it."""

    path: Path
    layers: tuple[Layer, ...]

    def graph(self) -> onnx.ModelProto:
        """Return the graph with references to its large weights."""
        return onnx.load(self.path, load_external_data=False)

    def weight(self, tensor: onnx.TensorProto) -> np.ndarray:
        """Read one of the graph's weights."""
        return numpy_helper.to_array(tensor, str(self.path.parent))

    def without(self, nodes: Collection[str]) -> "QuantizationSource":
        """Return the same model with fewer layers to quantize."""
        layers = tuple(layer for layer in self.layers if layer.node not in nodes)
        return QuantizationSource(self.path, layers)

    @property
    def inputs(self) -> list[Activation]:
        """The inputs of all layers, each once."""
        return list(dict.fromkeys(layer.input for layer in self.layers))


def source_of(
    proto: onnx.ModelProto, weights: Weights, float32: Collection[str], folder: Path
) -> QuantizationSource:
    """Write a graph to `folder` with its weights in a data file; each Gemm becomes MatMul and Add.

    Layers in `float32` are left out. The graph's large weights are in `weights`.

    Raises: SaccadeError if no layer is left.
    """
    own = put_back(proto, weights)
    _split_biases(own)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in own.graph.initializer}
    path = folder / "float32.onnx"
    onnx.save(own, path, save_as_external_data=True, location=_DATA, size_threshold=_SMALL_BYTES)
    layers = [
        _layer(node, shapes[node.input[1]])
        for node in own.graph.node
        if node.name not in float32
        and node.op_type in ("MatMul", "Conv")
        # Integer kernels of a MatMul have no batches of matrices.
        and len(shapes.get(node.input[1], ())) in ((2,) if node.op_type == "MatMul" else (3, 4, 5))
    ]
    if not layers:
        raise SaccadeError(
            "the model has no layer that can be computed in int8. Export with --precision fp32."
        )
    return QuantizationSource(path, tuple(layers))


def _layer(node: onnx.NodeProto, weight: tuple[int, ...]) -> Layer:
    if node.op_type == "MatMul":
        channels = 1
        ends = Activation(node.input[0], weight[0]), Activation(node.output[0], weight[1])
    else:
        groups = next((value.i for value in node.attribute if value.name == "group"), 1)
        spatial, channels = len(weight) - 2, 0
        ends = (
            Activation(node.input[0], weight[1] * groups, spatial),
            Activation(node.output[0], weight[0], spatial),
        )
    return Layer(node.name, ends[0], node.input[1], ends[1], channels)


def smoothed(
    source: QuantizationSource, extremes: dict[str, Extremes]
) -> tuple[QuantizationSource, dict[str, Extremes]]:
    """Divide normalized activations by a factor per channel, and multiply the weights by it.

    The function is the same in exact arithmetic: the factors go into the weight and bias of the
    LayerNormalization, and into the rows of every matrix that reads it. A normalization that
    anything else reads does not change.

    Returns: the new model, and the extremes of its activations.
    Source: Xiao et al. 2023 (arXiv 2211.10438), section 4, with a strength of 0.5.
    """
    proto = source.graph()
    graph = proto.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    layers = {layer.node: layer for layer in source.layers}
    ends = {value.name for value in graph.output}
    changed, weights = dict(extremes), dict[str, str]()
    for norm in graph.node:
        if norm.op_type != "LayerNormalization" or norm.output[0] in ends:
            continue
        name, read_by = norm.output[0], readers[norm.output[0]]
        scaled = [tensors.get(given) for given in norm.input[1:]]
        if not read_by or None in scaled or any(_other(node, name, layers) for node in read_by):
            continue
        matrices = {node.input[1]: source.weight(tensors[node.input[1]]) for node in read_by}
        factor = _factor(extremes[name].magnitude, list(matrices.values()))
        for index, given in enumerate(norm.input[1:], start=1):
            vector = source.weight(tensors[given])
            norm.input[index] = _add(graph, f"{norm.name}/smooth_{index}", vector / factor)
        for node in read_by:
            values = matrices[node.input[1]] * factor[:, None]
            weights[node.name] = node.input[1] = _add(graph, f"{node.name}/smooth", values)
        own = extremes[name]
        changed[name] = Extremes(own.low / factor, own.high / factor)
    path = source.path.with_name("smooth.onnx")
    _save(proto, path)
    again = [
        replace(layer, weight=weights.get(layer.node, layer.weight)) for layer in source.layers
    ]
    return QuantizationSource(path, tuple(again)), changed


def _other(node: onnx.NodeProto, name: str, layers: dict[str, Layer]) -> bool:
    """True unless a reader is a layer that multiplies the activation by a matrix."""
    layer = layers.get(node.name)
    return layer is None or layer.input != Activation(name, layer.input.channels)


def _factor(magnitude: np.ndarray, matrices: Sequence[np.ndarray]) -> np.ndarray:
    rows = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
    tiny = np.float32(1e-5)  # a channel that is always zero, or weights that ignore it
    factor = np.maximum(magnitude, tiny) ** _STRENGTH / np.maximum(rows, tiny) ** (1 - _STRENGTH)
    return np.asarray(np.maximum(factor, tiny), dtype=np.float32)


def _add(graph: onnx.GraphProto, name: str, values: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
    return name


def _save(proto: onnx.ModelProto, path: Path) -> None:
    """Write a graph beside the data file of its source; new weights go into a second data file."""
    read = {name for node in proto.graph.node for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    beside = path.with_suffix(".data")
    with beside.open("wb") as data:
        for tensor in kept:
            if len(tensor.raw_data) >= _SMALL_BYTES:
                start = data.tell()
                length = data.write(tensor.raw_data)
                external_data_helper.set_external_data(tensor, beside.name, start, length)
                tensor.ClearField("raw_data")
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    path.write_bytes(proto.SerializeToString())


def _split_biases(proto: onnx.ModelProto) -> None:
    """Split each Gemm into MatMul and Add.

    A Gemm whose third input is a residual cannot be quantized. The MatMul keeps the Gemm's name.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        given = {
            attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        plain = given.get("alpha", 1) == 1 and given.get("beta", 1) == 1
        if node.op_type != "Gemm" or not plain or given.get("transA") or len(node.input) != 3:
            nodes.append(node)
            continue
        a, b, c = node.input
        if given.get("transB"):
            if b not in weights:
                nodes.append(node)
                continue
            turned = numpy_helper.to_array(weights[b]).T
            b = f"{b}/turned"
            if b not in weights:
                weights[b] = numpy_helper.from_array(np.ascontiguousarray(turned), b)
                graph.initializer.append(weights[b])
        product = f"{node.name}/product"
        nodes.append(helper.make_node("MatMul", [a, b], [product], name=node.name))
        nodes.append(helper.make_node("Add", [product, c], node.output, name=f"{node.name}/bias"))
    set_nodes(graph, nodes)
