# SPDX-License-Identifier: Apache-2.0
"""Half-precision graphs: store weights in their type, and check the ranges of tensors."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from saccade.core.errors import GateFailed, SaccadeError
from saccade.exporter.artefact.manifest import FileEntry
from saccade.exporter.graph.layer_types import element_types
from saccade.exporter.graph.model_file import (
    LARGE_BYTES,
    Load,
    Weights,
    constant,
    graph_session,
    loader,
    read_model,
    referring,
    with_initializers,
)
from saccade.exporter.runtimes.runners import batches, onnx_runner
from saccade.models.interface import Arrays
from saccade.plugins.onnx_model import all_nodes, set_nodes

HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
# A quarter of the fp16 range: headroom for inputs that are not in the calibration data.
LARGEST_FP16 = 16_384.0
_BATCH = 8
_RANGE_OF = "saccade_range_of/"


def fold_casts(proto: onnx.ModelProto, weights: Weights | None = None) -> None:
    """Store a weight in the type that it is cast to, if nothing else reads it.

    Raises: SaccadeError if a weight is too large for that type.
    """
    graph = proto.graph
    given = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, int] = {}
    for node in all_nodes(graph):
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    kept = []
    for node in graph.node:
        kind = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
        source = given.get(node.input[0]) if node.op_type == "Cast" else None
        if source is None or kind not in HALF:
            kept.append(node)
            continue
        load = partial(_cast, source.name, loader(source, weights), kind)
        if readers[source.name] == 1:
            graph.initializer.remove(source)
        graph.initializer.append(constant(node.output[0], load, weights))
    set_nodes(graph, kept)


def _cast(name: str, load: Load, kind: int) -> np.ndarray:
    values = load()
    with np.errstate(over="ignore"):
        cast = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    if not np.isfinite(cast.astype(np.float32)).all():
        raise SaccadeError(
            f"weight {name}: has {np.abs(values).max():.3g}, more than fp16 can represent "
            "(65,504). Export with --precision bf16 or fp32."
        )
    return cast


def widened(
    proto: onnx.ModelProto, weights: Mapping[str, Load] | None = None
) -> tuple[onnx.ModelProto, Weights]:
    """Return the graph with all half-precision tensors in float32, for runtimes without the type.

    This checks the structure, but not the effect of rounding. Large weights become placeholders.
    """
    wide_weights = {**(weights or {})}

    def widen(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor.data_type not in HALF:
            return tensor
        load = partial(_wide, loader(tensor, weights))
        if (length := 4 * math.prod(tensor.dims)) < LARGE_BYTES:
            return constant(tensor.name, load, None)
        wide_weights[location := f"#{tensor.name}/wide"] = load
        return referring(tensor, location, length, kind=onnx.TensorProto.FLOAT)

    wide = with_initializers(proto, widen)
    for node in all_nodes(wide.graph):
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in HALF:
                attribute.i = onnx.TensorProto.FLOAT
    return wide, wide_weights


def _wide(load: Load) -> np.ndarray:
    return load().astype(np.float32)


def widened_session(path: Path, file: FileEntry, **options: Any) -> Any:
    """Apply `widened` to a file whose hash has been checked; return an ONNX Runtime session of it.

    Options are those of `onnx_session`.
    """
    return graph_session(*widened(*read_model(path, file)), **{"optimized": True, **options})


def activation_ranges(
    proto: onnx.ModelProto, samples: Arrays, weights: Mapping[str, Load] | None = None
) -> dict[str, float]:
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
    run = onnx_runner(_range_session(names, *widened(proto, weights)))
    largest = dict.fromkeys(names, 0.0)
    for some in batches(samples, _BATCH):
        for name, value in zip(names, run(some).values(), strict=True):
            largest[name] = max(largest[name], float(value))
    return largest


def _range_session(names: list[str], proto: onnx.ModelProto, weights: Weights) -> Any:
    """Return a session whose outputs are the ranges: no tensor outlives the nodes that read it."""
    graph = proto.graph
    wanted, nodes = set(names), []
    for node in graph.node:
        nodes.append(node)
        for name in wanted.intersection(node.output):
            magnitude = f"{_RANGE_OF}magnitude/{name}"
            nodes.append(onnx.helper.make_node("Abs", [name], [magnitude]))
            nodes.append(
                onnx.helper.make_node("ReduceMax", [magnitude], [_RANGE_OF + name], keepdims=0)
            )
    set_nodes(graph, nodes)
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=_RANGE_OF + name) for name in names)
    return graph_session(proto, weights, in_order=True)


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
