# SPDX-License-Identifier: Apache-2.0
"""Write a graph and its weights to disk, one tensor at a time.

protobuf can only serialize a message that is whole in memory. The writer here serializes the light
graph around its tensors and streams their bytes between: the file is, byte for byte, the one that
protobuf would write. A model beyond protobuf's 2 GiB has its large weights in a second file.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from saccade.exporter.artefact.manifest import DATA_SUFFIX, DataEntry, FileEntry
from saccade.exporter.graph.limits import BITS, FILE_BYTES, check_graph
from saccade.exporter.graph.weights import LARGE_BYTES, Load, loader, location_of, raw, refer

# Of one file: protobuf's limit, less room for what a runtime adds to the model.
ONE_FILE_BYTES = FILE_BYTES - 2**24
_ALIGNMENT = 4096  # of tensors in a data file: a page, so that a runtime can map each of them
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of ModelProto, GraphProto, TensorProto
_BYTES = 2  # wire type of fields that have a length

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
        parts = [_part(light.SerializeToString(deterministic=True))]
    return FileEntry(path.name, *_write(path, parts), data)


def _with_data_file(
    proto: onnx.ModelProto, weights: Mapping[str, Load], path: Path
) -> tuple[onnx.ModelProto, DataEntry]:
    """Write the large weights to `path`; return the graph that refers to them there."""
    light, parts, end = onnx.ModelProto(), [], 0
    light.ParseFromString(_fields(proto, lambda number: number != _GRAPH))
    light.graph.ParseFromString(_fields(proto.graph, lambda number: number != _INITIALIZER))
    for tensor in proto.graph.initializer:
        own = light.graph.initializer.add()
        if (length := _length(tensor)) < LARGE_BYTES:
            own.CopyFrom(tensor)
            continue
        own.name, own.data_type = tensor.name, tensor.data_type
        own.dims.extend(tensor.dims)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        refer(own, path.name, start, length)
        parts += [_part(bytes(start - end)), _values(tensor, weights)]
        end = start + length
    digest, size = _write(path, parts)
    return light, DataEntry(path.name, digest, size)


def _model(proto: onnx.ModelProto, weights: Mapping[str, Load]) -> list[Part]:
    """Return the parts of a model's bytes: fields in the order of their numbers, as by protobuf."""
    tensors: list[Part] = []
    for tensor in proto.graph.initializer:
        tensors += _field(_INITIALIZER, _tensor(tensor, weights))
    return _around(proto, _GRAPH, _field(_GRAPH, _around(proto.graph, _INITIALIZER, tensors)))


def _tensor(tensor: TensorProto, weights: Mapping[str, Load]) -> list[Part]:
    if not location_of(tensor):
        return [_part(tensor.SerializeToString(deterministic=True))]
    bare = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return _around(bare, _RAW_DATA, _field(_RAW_DATA, [_values(tensor, weights)]))


def _around(message: Any, number: int, inside: list[Part]) -> list[Part]:
    before = _fields(message, lambda other: other < number)
    return [_part(before), *inside, _part(_fields(message, lambda other: other > number))]


def _fields(message: Any, wanted: Callable[[int], bool]) -> bytes:
    made = type(message)()
    for field, value in message.ListFields():
        if wanted(field.number):
            held = getattr(made, field.name)
            if hasattr(held, "MergeFrom"):
                held.MergeFrom(value)
            else:
                setattr(made, field.name, value)
    return bytes(made.SerializeToString(deterministic=True))


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
