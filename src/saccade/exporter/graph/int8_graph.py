# SPDX-License-Identifier: Apache-2.0
"""Quantize a graph to 8-bit integers, explicitly, around its layers with constant weights."""

import logging
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from saccade.errors import SaccadeError, require
from saccade.exporter.graph.canonical import tidy
from saccade.leftovers import temporary_folder
from saccade.models.interface import Arrays

_BATCH = 16


def quantized(proto: onnx.ModelProto, samples: Arrays, float32: Collection[str]) -> onnx.ModelProto:
    """Add QuantizeLinear and DequantizeLinear around the layers with constant weights.

    Quantization is symmetric, as TensorRT requires. A layer's input has one scale: its largest
    magnitude on the samples, divided by 127. Its weights have one scale per output channel. Biases
    are added in float32. Nodes in `float32` and products of two computed matrices do not change.

    Shapes: samples as the graph's inputs, [n ...].
    Raises: SaccadeError if the graph has no such layer, MissingPackage without ONNX Runtime.
    """
    require("onnxruntime", extra="cpu")
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    apart = _biases_apart(proto)
    chosen = [name for name in _layers(apart) if name not in float32]
    if not chosen:
        raise SaccadeError(
            "the model has no layer that can be computed in int8. Export with --precision fp32."
        )
    with _scratch() as folder, _quiet():
        path = folder / "model.onnx"
        quantize_static(
            apart,
            path,
            _reader(samples),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Conv"],
            nodes_to_quantize=chosen,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": ["MatMul", "Conv"],
            },
        )
        return tidy(onnx.load(path))


def quantized_ranges(proto: onnx.ModelProto) -> dict[str, float]:
    """Return the largest magnitude that each quantized activation can represent, from its scale."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {
        node.input[0]: float(127 * values[node.input[1]])
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear"
    }


def _layers(proto: onnx.ModelProto) -> list[str]:
    """Nodes with one constant matrix or constant filters; integer kernels have no batches."""
    shapes = {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    return [
        node.name
        for node in proto.graph.node
        if (node.op_type == "MatMul" and shapes.get(node.input[1]) == 2)
        or (node.op_type == "Conv" and node.input[1] in shapes)
    ]


def _biases_apart(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with each Gemm split into MatMul and Add.

    A Gemm whose third input is a residual cannot be quantized. The MatMul keeps the Gemm's name.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
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
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(nodes)
    return tidy(copy)


def _reader(samples: Arrays) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.start = 0

        def get_next(self) -> dict[str, np.ndarray] | None:
            start, self.start = self.start, self.start + _BATCH
            some = {name: array[start : self.start] for name, array in samples.items()}
            return some if len(next(iter(some.values()))) else None

    return Reader()


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder that also contains the quantizer's own ones, so that all are removed."""
    before = tempfile.tempdir
    with temporary_folder("int8") as folder:
        tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the quantizer's advice to run a step that this graph does not need."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
