# SPDX-License-Identifier: Apache-2.0
"""Half-precision graphs: store weights in their type, and check the ranges of tensors."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from saccade.errors import GateFailed, SaccadeError
from saccade.exporter.graph.layer_types import element_types
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.onnx_model import all_nodes

HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
# A quarter of the fp16 range: headroom for inputs that are not in the calibration data.
LARGEST_FP16 = 16_384.0
_BATCH = 8


def fold_casts(proto: onnx.ModelProto) -> None:
    """Store a weight in the type that it is cast to, if nothing else reads it.

    Raises: SaccadeError if a weight is too large for that type.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, int] = {}
    for node in all_nodes(graph):
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    kept = []
    for node in graph.node:
        kind = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
        source = weights.get(node.input[0]) if node.op_type == "Cast" else None
        if source is None or kind not in HALF:
            kept.append(node)
            continue
        folded = _cast(source, kind)
        if readers[source.name] == 1:
            graph.initializer.remove(source)
        folded.name = node.output[0]
        graph.initializer.append(folded)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(nodes)


def _cast(tensor: onnx.TensorProto, kind: int) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        cast = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    if not np.isfinite(cast.astype(np.float32)).all():
        raise SaccadeError(
            f"weight {tensor.name}: has {np.abs(values).max():.3g}, more than fp16 can represent "
            "(65,504). Export with --precision bf16 or fp32."
        )
    return numpy_helper.from_array(cast)


def widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with all half-precision tensors in float32, for runtimes without the type.

    This checks the structure, but not the effect of rounding.
    """
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    for index, tensor in enumerate(wide.graph.initializer):
        if tensor.data_type in HALF:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            wide.graph.initializer[index].CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in all_nodes(wide.graph):
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in HALF:
                attribute.i = onnx.TensorProto.FLOAT
    return wide


def widened_bytes(model: Path | bytes) -> bytes:
    """Apply `widened` to a file or its bytes, and return bytes."""
    data = model if isinstance(model, bytes) else model.read_bytes()
    return bytes(widened(onnx.load_model_from_string(data)).SerializeToString())


def activation_ranges(proto: onnx.ModelProto, samples: Arrays) -> dict[str, float]:
    """Return the largest magnitude of every half-precision tensor over the samples.

    It is computed in float32, so numbers beyond the type's range are not lost.

    Shapes: samples as the graph's inputs, [n ...].
    """
    types = element_types(proto)
    fixed = {tensor.name for tensor in proto.graph.initializer}
    names = [
        name
        for node in proto.graph.node
        for name in node.output
        if types.get(name) in HALF and name not in fixed
    ]
    if not names:  # the whole component is a read-out
        return {}
    open_graph = widened(proto)
    del open_graph.graph.output[:]
    open_graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    run = onnx_runner(onnx_session(open_graph.SerializeToString(), optimized=False))
    largest = dict.fromkeys(names, 0.0)
    count = len(next(iter(samples.values())))
    for start in range(0, count, _BATCH):
        some = {name: array[start : start + _BATCH] for name, array in samples.items()}
        for name, value in run(some).items():
            largest[name] = max(largest[name], float(np.abs(value).max(initial=0)))
    return largest


def check_ranges(name: str, ranges: dict[str, float]) -> None:
    """Check that no tensor of an fp16 variant comes close to the largest number of fp16.

    Raises: GateFailed naming the tensor with the largest number.
    """
    beyond = {tensor: value for tensor, value in ranges.items() if not value <= LARGEST_FP16}
    if beyond:
        worst = max(beyond, key=lambda tensor: beyond[tensor])
        raise GateFailed(
            f"{name}: tensor {worst} reaches {beyond[worst]:.4g} on the calibration samples, "
            f"at most {LARGEST_FP16:,.0f} is allowed in fp16 (65,504 is its largest number). "
            "Nothing was written. Export with --precision bf16 or fp32."
        )
