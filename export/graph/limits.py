# SPDX-License-Identifier: Apache-2.0
"""Checks of an ONNX file that is read: its tensors have the data that they state, names are text.

What a file costs to load and run is not known before: `trial` finds out, within limits.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from saccade.core.errors import SaccadeError
from saccade.core.files import read_regular
from saccade.core.schema import AGAIN

FILE_BYTES = 2**31 - 1  # the limit of protobuf
AXES = 16  # NumPy supports 32, torch 25
NUMBERS = 2**31  # in one tensor
NAME_CHARACTERS = 1_000

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
        return read_regular(path, FILE_BYTES)
    except OSError as error:
        why = error.strerror or error
        raise SaccadeError(f"{path}: cannot be read ({why}). {AGAIN}") from error


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
    # Only weights of the whole model are expected in another file.
    for tensor in proto.graph.initializer:
        yield from _tensor_excesses(tensor, held)
    whole = _messages(proto, but="graph")
    for message in itertools.chain(whole, _messages(proto.graph, but="initializer")):
        if isinstance(message, onnx.TensorProto):
            yield from _tensor_excesses(message, {})
            continue
        if not isinstance(message, onnx.StringStringEntryProto):  # a remark
            yield from _name_excesses(_names(message))
        if isinstance(message, onnx.ValueInfoProto):
            axes = message.type.tensor_type.shape.dim
            sizes = [axis.dim_value if axis.HasField("dim_value") else 1 for axis in axes]
            yield from _dims_excesses(f"tensor {message.name[:80]!r}", sizes)
    for value in (*proto.graph.input, *proto.graph.output):
        what, kind = f"input or output {value.name[:80]!r}", value.type.tensor_type.elem_type
        if value.type.WhichOneof("value") != "tensor_type":
            yield f"{what} is not a tensor"
        elif kind not in BITS:
            yield f"{what} has the type {kind}, which ONNX does not know"


def _messages(message: Any, but: str = "") -> Iterator[Any]:
    """Yield a message and all messages inside, however deep, except those in the field `but`.

    The fields of tensors are not listed: that would copy their values.
    """
    yield message
    fields = () if isinstance(message, onnx.TensorProto) else message.ListFields()
    for field, value in fields:
        if field.message_type is not None and field.name != but:
            for inner in _values(value):
                yield from _messages(inner)


def _names(message: Any) -> Iterator[str | bytes]:
    """Yield the names in a message: of nodes, operators, values and axes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and field.name != "doc_string":
            yield from _values(value)


def _values(value: Any) -> Sequence[Any]:
    """Return the values of a field, which may be repeated."""
    is_repeated = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return value if is_repeated else (value,)


def _tensor_excesses(tensor: onnx.TensorProto, held: Held) -> Iterator[str]:
    what = f"tensor {tensor.name[:80]!r}"
    yield from _name_excesses((tensor.name,))
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


def _name_excesses(names: Iterable[str | bytes]) -> Iterator[str]:
    for name in names:
        if isinstance(name, bytes):  # protobuf returns bytes if it is not UTF-8
            yield f"has a name that is not text ({name[:40]!r})"
        elif len(name) > NAME_CHARACTERS:
            most = f"expected at most {NAME_CHARACTERS}"
            yield f"has a name of {len(name)} characters ({name[:40]!r}...), {most}"
        elif not name.isprintable():
            yield f"has a name with control characters ({name[:80]!r})"
