# SPDX-License-Identifier: Apache-2.0
"""Write a graph and its weights to disk, one tensor at a time.

protobuf can only serialize a message that is whole in memory. The writer here serializes the light
graph around its tensors and streams their bytes between: the file is, byte for byte, the one that
protobuf would write. A model beyond protobuf's 2 GiB has its large weights in a second file.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.manifest import DATA_SUFFIX, DataEntry, FileEntry
from saccade.exporter.graph.limits import BITS, FILE_BYTES, check_graph, parse_graph, read_file
from saccade.exporter.graph.weights import (
    GRAPH,
    INITIALIZER,
    LARGE_BYTES,
    RAW_DATA,
    Load,
    fields_of,
    loader,
    location_of,
    raw,
    referring,
    with_initializers,
)

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
