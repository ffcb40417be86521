# SPDX-License-Identifier: Apache-2.0
"""The float32 model on disk that is quantized: its layers, and ranges and smoothing of inputs."""

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper, helper, numpy_helper

from saccade.core.errors import SaccadeError
from saccade.core.machine import cores
from saccade.exporter.graph.model_file import Weights, put_back
from saccade.exporter.runtimes.runners import batches, onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.onnx_model import set_nodes

_BATCH = 4
_HISTOGRAM_SAMPLES = 16  # millions of numbers each, which NumPy counts one by one
_LOW, _HIGH = "/low", "/high"  # suffixes of the values added to a graph


@dataclass(frozen=True)
class Activation:
    """A tensor to be quantized, and where its channels are.

    Shapes: [... channels] of a matrix product; [b channels ...], with `spatial` more axes, of a
        convolution.
    """

    name: str
    channels: int
    spatial: int = 0  # axes after the channels


@dataclass(frozen=True)
class Extremes:
    """The smallest and largest value of each channel.

    Shapes: both [channels] float32.
    """

    low: np.ndarray
    high: np.ndarray

    @property
    def magnitude(self) -> np.ndarray:
        """The largest magnitude of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def ends(self) -> tuple[float, float]:
        """The range of all channels together."""
        return float(self.low.min()), float(self.high.max())


def extremes_of(model: Path, activations: list[Activation], samples: Arrays) -> dict[str, Extremes]:
    """Run a model and return the extremes of activations; the graph itself reduces each batch.

    Shapes: samples as the graph's inputs, [n ...].
    """
    proto = onnx.load(model, load_external_data=False)
    graph = proto.graph
    del graph.output[:]
    for activation in activations:
        _reduce(graph, activation)
    path = model.with_name("extremes.onnx")  # beside the data file that both refer to
    path.write_bytes(proto.SerializeToString())
    run = onnx_runner(onnx_session(path, threads=cores()))
    seen: dict[str, np.ndarray] = {}
    for some in batches(samples, _BATCH):
        for name, value in run(some).items():
            merge = np.minimum if name.endswith(_LOW) else np.maximum
            seen[name] = merge(seen[name], value) if name in seen else value
    return {
        activation.name: Extremes(seen[activation.name + _LOW], seen[activation.name + _HIGH])
        for activation in activations
    }


def _reduce(graph: onnx.GraphProto, activation: Activation) -> None:
    axes = (0, *range(2, 2 + activation.spatial)) if activation.spatial else (0,)
    source, own = activation.name, f"{activation.name}/reduced"
    graph.initializer.append(numpy_helper.from_array(np.array(axes), f"{own}/axes"))
    if not activation.spatial:
        shape = np.array([-1, activation.channels])
        graph.initializer.append(numpy_helper.from_array(shape, f"{own}/shape"))
        graph.node.append(helper.make_node("Reshape", [source, f"{own}/shape"], [own]))
        source = own
    for operator, suffix in (("ReduceMin", _LOW), ("ReduceMax", _HIGH)):
        name = activation.name + suffix
        graph.node.append(helper.make_node(operator, [source, f"{own}/axes"], [name], keepdims=0))
        graph.output.append(onnx.ValueInfoProto(name=name))


def percentiles_of(
    model: Path, names: list[str], samples: Arrays, percentile: float
) -> dict[str, tuple[float, float]]:
    """Return the range of each tensor that contains `percentile` % of its values.

    ONNX Runtime's calibrator keeps a histogram per tensor, and the activations of one sample.
    """
    from onnxruntime.quantization.calibrate import PercentileCalibrater

    class Chosen(PercentileCalibrater):
        def select_tensors_to_calibrate(self, model: onnx.ModelProto) -> Any:
            return set(names), {name: onnx.ValueInfoProto(name=name) for name in names}

    path = model.with_name("histograms.onnx")
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # it prints its progress
        calibrator = Chosen(model, augmented_model_path=str(path), percentile=percentile)
        calibrator.model = onnx.load(model, load_external_data=False)
        calibrator.augment_graph()
        calibrator.create_inference_session()
        for some in batches(samples, 1, _HISTOGRAM_SAMPLES):
            calibrator.collect_data(_Reader(some))
        data = calibrator.compute_data()
    ends = {name: data[name].range_value for name in names}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


class _Reader:
    """One batch, in the form that ONNX Runtime's calibrators read."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        self.left = [batch]

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


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
