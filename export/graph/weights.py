# SPDX-License-Identifier: Apache-2.0
"""Large weights of a graph in progress: kept outside its proto, which stays a few hundred KiB.

A rewritten proto is copied, compared, checked and serialized many times. With the weights inside,
each of these would take as much memory as the model. A placeholder is an initializer whose external
data has a location that starts with `#`, as the ONNX checker allows for data in memory. Its values
are computed when they are needed: views of the torch parameters, casts and transposes of them.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, numpy_helper

from saccade.exporter.runtimes.runners import onnx_session

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # fields of ModelProto, GraphProto, TensorProto
LARGE_BYTES = 2**16  # smaller ones stay in the graph: shape inference reads shapes from there
Load = Callable[[], np.ndarray]
Weights = dict[str, Load]  # by the location of their placeholders


def placeholder(name: str, load: Load, weights: Weights) -> TensorProto:
    """Return the initializer for large values and add them to `weights`.

    Its location is a hash of type, shape and values: equal weights have equal placeholders.
    """
    values = np.ascontiguousarray(load())
    digest = hashlib.sha256(f"{values.dtype} {values.shape}".encode())
    digest.update(raw(values))
    weights.setdefault(location := f"#{digest.hexdigest()}", load)
    kind = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=values.shape)
    return referring(tensor, location, values.nbytes)


def constant(name: str, load: Load, weights: Weights | None) -> TensorProto:
    """Return the initializer for values of any size; without `weights`, it contains them."""
    values = load()
    if weights is None or values.nbytes < LARGE_BYTES:
        return numpy_helper.from_array(np.ascontiguousarray(values), name)
    return placeholder(name, load, weights)


def referring(
    like: TensorProto, location: str, length: int, offset: int = 0, kind: int | None = None
) -> TensorProto:
    """Return a tensor `like` another one, whose values are outside the proto."""
    tensor = TensorProto(name=like.name, data_type=kind or like.data_type, dims=like.dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def location_of(tensor: TensorProto) -> str:
    """Return the location of a tensor's external data; empty if it contains its values."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def loader(tensor: TensorProto, weights: Mapping[str, Load] | None) -> Load:
    """Return a function that returns the values of an initializer, placeholder or not."""
    if location := location_of(tensor):
        return (weights or {})[location]
    return partial(numpy_helper.to_array, tensor)


def raw(values: np.ndarray) -> memoryview:
    """Return the bytes of contiguous values without copying them."""
    return values.reshape(-1).view(np.uint8).data


def set_apart(model: onnx_ir.Model, weights: Weights) -> None:
    """Replace the large initializers of the exporter's model, which refer to torch's memory."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < LARGE_BYTES:
            continue
        made = placeholder(value.name or "", tensor.numpy, weights)
        value.const_value = onnx_ir.ExternalTensor(
            location_of(made),
            0,
            tensor.nbytes,
            tensor.dtype,
            shape=onnx_ir.Shape(made.dims),
            name=made.name,
        )


def put_back(proto: onnx.ModelProto, weights: Mapping[str, Load]) -> onnx.ModelProto:
    """Return a copy that contains its weights, for a library that needs a complete model."""

    def complete(tensor: TensorProto) -> TensorProto:
        if not location_of(tensor):
            return tensor
        values = np.ascontiguousarray(loader(tensor, weights)())
        return numpy_helper.from_array(values, tensor.name)

    return with_initializers(proto, complete)


def with_initializers(
    proto: onnx.ModelProto, change: Callable[[TensorProto], TensorProto]
) -> onnx.ModelProto:
    """Return a copy whose initializers are what `change` returns for those of `proto`."""
    changed = without_initializers(proto)
    changed.graph.initializer.extend(map(change, proto.graph.initializer))
    return changed


def without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the initializers, which are never copied on the way."""
    light = onnx.ModelProto()
    light.ParseFromString(fields_of(proto, lambda number: number != GRAPH))
    light.graph.ParseFromString(fields_of(proto.graph, lambda number: number != INITIALIZER))
    return light


def fields_of(message: Any, wanted: Callable[[int], bool]) -> bytes:
    """Return the bytes of some fields of a message, chosen by their numbers, in that order."""
    made = type(message)()
    for field, value in message.ListFields():
        if wanted(field.number):
            held = getattr(made, field.name)
            if hasattr(held, "MergeFrom"):
                held.MergeFrom(value)
            else:
                setattr(made, field.name, value)
    return bytes(made.SerializeToString(deterministic=True))


def graph_session(
    proto: onnx.ModelProto, weights: Mapping[str, Load] | None = None, **options: Any
) -> Any:
    """Return an ONNX Runtime session of a graph with placeholders; options of `onnx_session`.

    By default, each node runs as it is.
    """
    values = {
        tensor.name: np.ascontiguousarray(loader(tensor, weights)())
        for tensor in proto.graph.initializer
        if location_of(tensor)
    }
    options = {"optimized": False, **options}
    return onnx_session(proto.SerializeToString(), initializers=values, **options)


def evaluated(node: onnx.NodeProto, opset: int, inputs: list[Load], index: int) -> Load:
    """Return a function that computes one output of an operator from its inputs."""
    from onnx.reference import ReferenceEvaluator

    def load() -> np.ndarray:
        run: Any = ReferenceEvaluator(node, opsets={"": opset})
        names = [name for name in node.input if name]
        given = {name: value() for name, value in zip(names, inputs, strict=True)}
        return np.asarray(run.run(None, given)[index])

    return load
