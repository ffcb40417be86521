# SPDX-License-Identifier: Apache-2.0
"""Flax's serialisation: a tree of arrays in MessagePack, read without Flax and without pickle."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from saccade import limits
from saccade.errors import SaccadeError, require
from saccade.files import read_regular

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
}


def is_messages(head: bytes) -> bool:
    """Whether a file that begins so is a map whose first key is a text."""
    lengths = {0xDE: 3, 0xDF: 5}  # bytes of a map's head, where it has more than 15 keys
    first = lengths.get(head[0], 1) if head else 0
    if not head or (head[0] & 0xF0 != 0x80 and first == 1) or len(head) <= first:
        return False
    return head[first] & 0xE0 == 0xA0 or head[first] == 0xD9


def read_messages(path: Path) -> Any:
    """The tree in the file, arrays as NumPy has them; bfloat16 becomes float32.

    Raises: SaccadeError if the file is damaged or holds what is not an array, number or text.
    Source: flax.serialization, to_bytes.
    """
    msgpack: Any = require("msgpack", extra="export")
    try:
        data = read_regular(path, limits.WEIGHTS_BYTES)
        held = _Counted()
        tree = msgpack.unpackb(
            data,
            ext_hook=_extension,
            object_pairs_hook=held.mapping,
            list_hook=held.sequence,
            raw=False,
            strict_map_key=False,
            max_map_len=limits.TREE_VALUES,
            max_array_len=limits.TREE_VALUES,
        )
        return _joined(tree)
    except Exception as error:  # msgpack, NumPy and the tree's own shape have their own kinds
        raise SaccadeError(
            f"{path}: not a tree that Flax saved, or damaged ({type(error).__name__}: {error}). "
            "Save it with flax.serialization.to_bytes(parameters)."
        ) from error


class _Counted:
    """A byte of the file can be a whole dictionary in memory: how many values there are in all."""

    def __init__(self) -> None:
        self.left = limits.TREE_VALUES

    def mapping(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._take(len(pairs))
        return dict(pairs)

    def sequence(self, values: list[Any]) -> list[Any]:
        self._take(len(values))
        return values

    def _take(self, count: int) -> None:
        self.left -= count + 1
        if self.left < 0:
            raise ValueError(f"holds more than {limits.TREE_VALUES} values")


def _extension(code: int, data: bytes) -> Any:
    if code == _COMPLEX:
        raise ValueError("complex numbers cannot be weights")
    if code not in (_ARRAY, _SCALAR):
        raise ValueError(f"extension type {code} is unknown")
    msgpack: Any = require("msgpack", extra="export")
    shape, name, buffer = msgpack.unpackb(data, raw=False, max_array_len=limits.AXES)
    array = _array(shape, name, buffer)
    return array[()] if code == _SCALAR else array


def _array(shape: Any, name: Any, buffer: Any) -> np.ndarray:
    if not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"shape {shape!r} is not a list of sizes")
    if name not in _DTYPES or not isinstance(buffer, bytes):
        raise ValueError(f"type {name!r} is no type of weights")
    stored = np.dtype("uint16" if name == "bfloat16" else name)
    if prod(shape) * stored.itemsize != len(buffer):
        raise ValueError(f"{len(buffer)} bytes for {name} of shape {shape}")
    array = np.frombuffer(buffer, stored).reshape(shape)
    if name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _joined(tree: Any) -> Any:
    """Large arrays are stored in pieces, each a value of a map numbered from 0."""
    if not isinstance(tree, Mapping):
        return tree
    if tree.get(_CHUNKED):
        pieces = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        shape = [tree["shape"][str(i)] for i in range(len(tree["shape"]))]
        return np.concatenate([piece.reshape(-1) for piece in pieces]).reshape(shape)
    return {key: _joined(value) for key, value in tree.items()}
