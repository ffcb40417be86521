# SPDX-License-Identifier: Apache-2.0
"""Limits on what an ONNX file may require of its reader, checked without executing the file.

Each limit is well above the largest honest export known. Among the things counted are nodes with
every function expanded, and iterations of loops with a constant count. A loop whose count is
computed has to be run to be measured: `trial` does that.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import onnx

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.exporter.graph.calls import NODES, call_excesses, graphs_in

FILE_BYTES = 2**31 - 1  # the limit of protobuf
FUNCTIONS = 1_000
GRAPH_DEPTH = 8  # graphs inside nodes: saccade's have a loop in a loop
AXES = 16  # NumPy supports 32, torch 25
NUMBERS = 2**31  # in one tensor
TENSORS = 100_000
NAME_CHARACTERS = 1_000
OPSETS = 100

# Bytes of the files (or of the placeholders, in a graph in progress) that tensors may refer to.
Held = Mapping[str, int]
_OUTSIDE = ["location", "offset", "length"]
_DIGITS = re.compile("[0-9]{1,18}")

# Numbers per stored entry: `int32_data` packs types that are smaller than a byte.
_MOST_PER_ENTRY = 8
_TYPED_DATA = (
    "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data",
)  # fmt: skip
_BITS = {
    "FLOAT": 32, "UINT8": 8, "INT8": 8, "UINT16": 16, "INT16": 16, "INT32": 32, "INT64": 64,
    "STRING": 0, "BOOL": 8, "FLOAT16": 16, "DOUBLE": 64, "UINT32": 32, "UINT64": 64,
    "COMPLEX64": 64, "COMPLEX128": 128, "BFLOAT16": 16, "FLOAT8E4M3FN": 8, "FLOAT8E4M3FNUZ": 8,
    "FLOAT8E5M2": 8, "FLOAT8E5M2FNUZ": 8, "FLOAT8E8M0": 8, "UINT4": 4, "INT4": 4,
    "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2,
}  # fmt: skip
_TENSOR_TYPES = dict(onnx.TensorProto.DataType.items())
BITS = {_TENSOR_TYPES[name]: bits for name, bits in _BITS.items() if name in _TENSOR_TYPES}


def read_file(path: Path) -> bytes:
    """Read the bytes of an ONNX file.

    Raises: SaccadeError if it cannot be read or is too large.
    """
    try:
        if (size := path.stat().st_size) > FILE_BYTES:
            raise SaccadeError(f"{path}: has {size} bytes, expected at most {FILE_BYTES}.")
        return path.read_bytes()
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be read ({error.strerror}). {AGAIN}") from error


def parse_graph(data: bytes, where: str, held: Held | None = None) -> onnx.ModelProto:
    """Parse the bytes of an ONNX file and check that the model is within the limits.

    Raises: SaccadeError if they are not an ONNX model, or for the first limit that it exceeds.
    """
    try:
        proto = onnx.load_model_from_string(data)
    except Exception as error:  # the only common base of protobuf's errors
        raise SaccadeError(f"{where}: is not a complete ONNX model ({error}). {AGAIN}") from error
    check_graph(proto, where, held)
    return proto


def check_graph(proto: onnx.ModelProto, where: str, held: Held | None = None) -> None:
    """Refuse a model that exceeds the limits, or that refers to data outside `held`.

    Raises: SaccadeError with what was found and what is expected.
    """
    for excess in _excesses(proto, held or {}):
        raise SaccadeError(f"{where}: {excess}. {AGAIN}")


def _excesses(proto: onnx.ModelProto, held: Held) -> Iterator[str]:
    for what, count, most in (
        ("functions", len(proto.functions), FUNCTIONS),
        ("operator sets", len(proto.opset_import), OPSETS),
        ("graphs for training", len(proto.training_info), 0),
    ):
        if count > most:
            yield f"has {count} {what}, expected at most {most}"
    yield from _names(opset.domain for opset in proto.opset_import)
    graphs = _Graphs(held)
    yield from graphs.excesses(proto)
    for where, value in (
        *(("input", value) for value in proto.graph.input),
        *(("output", value) for value in proto.graph.output),
    ):
        yield from _value_excesses(where, value)
    yield from call_excesses(proto)


@dataclass
class _Graphs:
    """Walk through every graph of a file and check sizes and names, without expanding calls."""

    held: Held
    nodes: int = 0
    tensors: int = 0

    def excesses(self, proto: onnx.ModelProto) -> Iterator[str]:
        yield from self._graph(proto.graph, 1)
        for function in proto.functions:
            yield from _names((function.domain, function.name, function.overload, *function.input))
            yield from _names(function.output)
            yield from self._nodes(function.node, 1)
            yield from _shapes(function.value_info)

    def _graph(self, graph: onnx.GraphProto, depth: int) -> Iterator[str]:
        if depth > GRAPH_DEPTH:
            yield f"has graphs nested more than {GRAPH_DEPTH} deep"
        # Only weights of the whole model are expected in another file.
        yield from self._tensors(graph.initializer, self.held if depth == 1 else {})
        for tensor in graph.sparse_initializer:
            yield from self._tensors((tensor.values, tensor.indices))
        for values in (graph.input, graph.output, graph.value_info):
            yield from _shapes(values)
        yield from self._nodes(graph.node, depth)

    def _nodes(self, nodes: Iterable[onnx.NodeProto], depth: int) -> Iterator[str]:
        self.nodes += len(nodes)  # type: ignore[arg-type]
        if self.nodes > NODES:
            yield f"has {self.nodes} nodes, expected at most {NODES}"
        for node in nodes:
            yield from _names(
                (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
            )
            for attribute in node.attribute:
                yield from _names((attribute.name,))
                yield from self._attribute(attribute, depth)

    def _attribute(self, attribute: onnx.AttributeProto, depth: int) -> Iterator[str]:
        if attribute.HasField("t"):
            yield from self._tensors((attribute.t,))
        if attribute.HasField("sparse_tensor"):
            held = attribute.sparse_tensor
            yield from self._tensors((held.values, held.indices))
        yield from self._tensors(attribute.tensors)
        for tensor in attribute.sparse_tensors:
            yield from self._tensors((tensor.values, tensor.indices))
        for graph in graphs_in(attribute):
            yield from self._graph(graph, depth + 1)

    def _tensors(
        self, tensors: Iterable[onnx.TensorProto], held: Held = MappingProxyType({})
    ) -> Iterator[str]:
        for tensor in tensors:
            self.tensors += 1
            if self.tensors > TENSORS:
                yield f"has more than {TENSORS} tensors"
            yield from _names((tensor.name,))
            yield from _tensor_excesses(tensor, held)


def _tensor_excesses(tensor: onnx.TensorProto, held: Held) -> Iterator[str]:
    what = f"tensor {tensor.name[:80]!r}"
    if tensor.data_type not in BITS:
        yield f"{what} has the type {tensor.data_type}, which ONNX does not know"
    yield from _dims_excesses(what, tensor.dims)
    count, bits = math.prod(tensor.dims), BITS.get(tensor.data_type, 0)
    if tensor.data_location or tensor.external_data:
        yield from _outside_excesses(what, tensor, held, -(-count * bits // 8))
    elif tensor.HasField("raw_data"):
        stored, expected = len(tensor.raw_data), -(-count * bits // 8)
        if stored != expected:
            yield f"{what} of {list(tensor.dims)} has {stored} bytes, expected {expected}"
    elif count > _MOST_PER_ENTRY * sum(len(getattr(tensor, field)) for field in _TYPED_DATA):
        yield f"{what} of {list(tensor.dims)} contains fewer numbers than its shape"


def _outside_excesses(
    what: str, tensor: onnx.TensorProto, held: Held, expected: int
) -> Iterator[str]:
    """Check a reference to another file: which one, and that the part is inside it."""
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    known = dict(entries)
    location = known.get("location", "")
    if location not in held or BITS.get(tensor.data_type, 0) < 8:
        known_files = " or ".join(map(repr, held)) or "them in this one"
        yield f"{what} keeps weights in another file, {location[:80]!r}, expected {known_files}"
        return
    numbers = [known.get(key, "") for key in ("offset", "length")]
    if sorted(known) != ["length", "location", "offset"] or len(entries) != len(known):
        yield f"{what} has the keys {[key[:20] for key, _ in entries]}, expected {_OUTSIDE}"
    elif not all(map(_DIGITS.fullmatch, numbers)):
        yield f"{what} has {_OUTSIDE[1:]} {numbers!r:.80}, expected numbers of bytes"
    else:
        offset, length = map(int, numbers)
        if length != expected:
            yield f"{what} of {list(tensor.dims)} has {length} bytes, expected {expected}"
        if any(len(getattr(tensor, field)) for field in (*_TYPED_DATA, "raw_data")):
            yield f"{what} of {list(tensor.dims)} has {length} bytes in two places"
        if offset + length > held[location]:
            yield (
                f"{what} ends at byte {offset + length} of {location[:80]!r}, which has "
                f"{held[location]}"
            )


def _dims_excesses(what: str, dims: Iterable[int]) -> Iterator[str]:
    sizes = list(dims)
    if len(sizes) > AXES:
        yield f"{what} has {len(sizes)} axes, expected at most {AXES}"
    elif min(sizes, default=0) < 0:
        yield f"{what} has an axis of {min(sizes)}"
    elif math.prod(sizes) > NUMBERS:
        yield f"{what} has {math.prod(sizes)} numbers, expected at most {NUMBERS}"


def _value_excesses(what: str, value: onnx.ValueInfoProto) -> Iterator[str]:
    if value.type.WhichOneof("value") != "tensor_type":
        yield f"{what} {value.name[:80]!r} is not a tensor"
    elif value.type.tensor_type.elem_type not in BITS:
        kind = value.type.tensor_type.elem_type
        yield f"{what} {value.name[:80]!r} has the type {kind}, which ONNX does not know"


def _shapes(values: Iterable[onnx.ValueInfoProto]) -> Iterator[str]:
    for value in values:
        yield from _names((value.name,))
        axes = value.type.tensor_type.shape.dim
        yield from _names(axis.dim_param for axis in axes)
        fixed = [axis.dim_value for axis in axes if axis.HasField("dim_value")]
        yield from _dims_excesses(f"tensor {value.name[:80]!r}", fixed)
        if len(axes) > AXES:
            yield f"tensor {value.name[:80]!r} has {len(axes)} axes, expected at most {AXES}"


def _names(names: Iterable[str | bytes]) -> Iterator[str]:
    for name in names:
        if isinstance(name, bytes):  # protobuf returns bytes if it is not UTF-8
            yield f"has a name that is not text ({name[:40]!r})"
        elif len(name) > NAME_CHARACTERS:
            most = f"expected at most {NAME_CHARACTERS}"
            yield f"has a name of {len(name)} characters ({name[:40]!r}...), {most}"
        elif not name.isprintable():
            yield f"has a name with control characters ({name[:80]!r})"
