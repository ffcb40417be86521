# SPDX-License-Identifier: Apache-2.0
"""Write a graph and its weights to disk, one tensor at a time.

protobuf can only serialize a message that is whole in memory. The writer here serializes the light
graph around its tensors and streams their bytes between: the file is, byte for byte, the one that
protobuf would write. A model beyond protobuf's 2 GiB has its large weights in a second file.

A graph in progress is copied, compared, checked and serialized many times. Its large weights are
outside, so that it stays a few hundred KiB. A placeholder is an initializer whose external data has
a location that starts with `#`, as the ONNX checker allows for data in memory. Its values are
computed when they are needed: views of the torch parameters, casts and transposes of them.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, numpy_helper

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.manifest import DATA_SUFFIX, DataEntry, FileEntry
from saccade.exporter.graph.limits import BITS, FILE_BYTES, check_graph, parse_graph, read_file
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


# Of one file: protobuf's limit, less room for what a runtime adds to the model.
ONE_FILE_BYTES = FILE_BYTES - 2**24
_ALIGNMENT = 4096  # of tensors in a data file: a page, so that a runtime can map each of them
_BYTES = 2  # wire type of fields that have a length

_DATA_HASH = "data_sha256"

Part = tuple[int, Callable[[], bytes | memoryview]]  # the number of bytes, and the bytes


def write_model(proto: onnx.ModelProto, weights: Mapping[str, Load], path: Path) -> FileEntry:
    """Check a graph and write it to `path`, with a second file for its weights if it is too large.

    Raises: SaccadeError if the graph exceeds the limits, OSError if a file cannot be written.
    """
    held = {location_of(tensor): _length(tensor) for tensor in proto.graph.initializer}
    check_graph(proto, "the exported graph", held)
    onnx.checker.check_model(proto, full_check=True)
    parts, data = _model(proto, weights), None
    if _bytes_of(parts) > ONE_FILE_BYTES:
        light, data = _with_data_file(proto, weights, path.with_name(path.name + DATA_SUFFIX))
        # The hash of the model's file is also one of its weights, wherever only it is compared.
        light.metadata_props.add(key=_DATA_HASH, value=data.sha256)
        parts = [_part(light.SerializeToString(deterministic=True))]
    return FileEntry(path.name, *_write(path, parts), data)


def read_model(
    path: Path, file: FileEntry, where: str = ""
) -> tuple[onnx.ModelProto, dict[str, Load]]:
    """Read a file whose hash has been checked, with placeholders for weights in its data file.

    The weights are mapped into memory, not read.

    Raises: SaccadeError if the file cannot be read, for the first limit that it exceeds, or if it
        refers to anything but `file.data`, which is in the same folder.
    """
    where, data = where or str(path), file.data
    proto = parse_graph(read_file(path), where, {data.name: data.bytes} if data else {})
    said = [entry.value for entry in proto.metadata_props if entry.key == _DATA_HASH]
    if data and said != [data.sha256]:
        raise SaccadeError(
            f"{where}: was written with a data file of SHA-256 {(*said, 'unknown')[0]:.12}..., but "
            f"its manifest names one of {data.sha256[:12]}.... {AGAIN}"
        )
    weights: dict[str, Load] = {}
    for tensor in proto.graph.initializer:
        if location := location_of(tensor):
            offset = int(next(e.value for e in tensor.external_data if e.key == "offset"))
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            # A separate name for each tensor: all of them have the same location in the file.
            own = f"#{tensor.name}"
            weights[own] = partial(
                np.memmap, path.with_name(location), kind, "r", offset, (*tensor.dims,)
            )
            tensor.CopyFrom(referring(tensor, own, _length(tensor)))
    return proto, weights


def without_values(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the values of large weights, for checks that need only shapes.

    Those of a wrong length stay: the ONNX checker refuses them.
    """

    def light(tensor: TensorProto) -> TensorProto:
        is_large = len(tensor.raw_data) == (length := _length(tensor)) >= LARGE_BYTES
        return referring(tensor, "#dropped", length) if is_large else tensor

    return with_initializers(proto, light)


def _with_data_file(
    proto: onnx.ModelProto, weights: Mapping[str, Load], path: Path
) -> tuple[onnx.ModelProto, DataEntry]:
    """Write the large weights to `path`; return the graph that refers to them there."""
    parts: list[Part] = []

    def moved(tensor: TensorProto) -> TensorProto:
        if (length := _length(tensor)) < LARGE_BYTES:
            return tensor
        end = _bytes_of(parts)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        parts.extend((_part(bytes(start - end)), _values(tensor, weights)))
        return referring(tensor, path.name, length, start)

    light = with_initializers(proto, moved)
    return light, DataEntry(path.name, *_write(path, parts))


def _model(proto: onnx.ModelProto, weights: Mapping[str, Load]) -> list[Part]:
    """Return the parts of a model's bytes: fields in the order of their numbers, as by protobuf."""
    tensors: list[Part] = []
    for tensor in proto.graph.initializer:
        tensors += _field(INITIALIZER, _tensor(tensor, weights))
    return _around(proto, GRAPH, _field(GRAPH, _around(proto.graph, INITIALIZER, tensors)))


def _tensor(tensor: TensorProto, weights: Mapping[str, Load]) -> list[Part]:
    if not location_of(tensor):
        return [_part(tensor.SerializeToString(deterministic=True))]
    bare = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return _around(bare, RAW_DATA, _field(RAW_DATA, [_values(tensor, weights)]))


def _around(message: Any, number: int, inside: list[Part]) -> list[Part]:
    before = fields_of(message, lambda other: other < number)
    return [_part(before), *inside, _part(fields_of(message, lambda other: other > number))]


def _field(number: int, parts: list[Part]) -> list[Part]:
    return [_part(_varint(number << 3 | _BYTES) + _varint(_bytes_of(parts))), *parts]


def _varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def _values(tensor: TensorProto, weights: Mapping[str, Load]) -> Part:
    load = loader(tensor, weights)
    return _length(tensor), lambda: raw(np.ascontiguousarray(load()))


def _part(data: bytes) -> Part:
    return len(data), lambda: data


def _bytes_of(parts: list[Part]) -> int:
    return sum(size for size, _ in parts)


def _length(tensor: TensorProto) -> int:
    """Bytes of a tensor's values, wherever they are."""
    return -(-math.prod(tensor.dims) * BITS[tensor.data_type] // 8)


def _write(path: Path, parts: list[Part]) -> tuple[str, int]:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for _, load in parts:
            piece = load()
            digest.update(piece)
            file.write(piece)
    path.chmod(0o644)
    return digest.hexdigest(), _bytes_of(parts)
