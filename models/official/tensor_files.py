# SPDX-License-Identifier: Apache-2.0
"""Read other projects' checkpoint files as flat tensors; nothing in a file is ever executed."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core import limits
from saccade.core.archives import ArchiveRefused, check_archive, read_arrays
from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.files import read_regular
from saccade.core.json_text import parse_json
from saccade.core.schema import read_json
from saccade.models.checkpoint_format import check_entries
from saccade.models.torch_file import NeedsCode, TorchFileRefused, load_torch

if TYPE_CHECKING:
    from torch import Tensor

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
}


def is_messages(head: bytes) -> bool:
    """Return True if a file with this beginning is a map whose first key is a string."""
    lengths = {0xDE: 3, 0xDF: 5}  # bytes of a map's head if it has more than 15 keys
    first = lengths.get(head[0], 1) if head else 0
    if not head or (head[0] & 0xF0 != 0x80 and first == 1) or len(head) <= first:
        return False
    return head[first] & 0xE0 == 0xA0 or head[first] == 0xD9


def read_messages(path: Path) -> Any:
    """Read the tree in the file, with NumPy arrays; bfloat16 becomes float32.

    Raises: SaccadeError if the file is damaged or has values of other types.
    Source: flax.serialization, to_bytes.
    """
    msgpack: Any = require("msgpack", extra="export")
    try:
        data = read_regular(path, limits.WEIGHTS_BYTES)
        held = _ValueCounter()
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
    except Exception as error:  # msgpack, NumPy and the tree's own shape raise their own types
        problem = f"not a tree saved by Flax, or damaged ({type(error).__name__}: {error})"
        advice = "Save it with flax.serialization.to_bytes(parameters)."
        raise _refused(path, problem, advice) from error


class _ValueCounter:
    """Counts all values, because one byte of the file can become a whole dictionary in memory."""

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
            raise ValueError(f"contains more than {limits.TREE_VALUES} values")


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
        raise ValueError(f"type {name!r} is not a type of weights")
    stored = np.dtype("uint16" if name == "bfloat16" else name)
    if prod(shape) * stored.itemsize != len(buffer):
        raise ValueError(f"{len(buffer)} bytes do not fit {name} of shape {shape}")
    array = np.frombuffer(buffer, stored).reshape(shape)
    if name == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _joined(tree: Any) -> Any:
    """Join large arrays, which are stored as pieces in a map numbered from 0."""
    if not isinstance(tree, Mapping):
        return tree
    if tree.get(_CHUNKED):
        pieces = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        shape = [tree["shape"][str(i)] for i in range(len(tree["shape"]))]
        return np.concatenate([piece.reshape(-1) for piece in pieces]).reshape(shape)
    return {key: _joined(value) for key, value in tree.items()}


# Where training code puts the weights among other things, the likeliest first.
CONTAINERS = ("state_dict", "model_state_dict", "model", "params", "target")
# Prefixes that distributed training and torch.compile add to every name.
_WRAPPERS = ("module.", "_orig_mod.")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")  # a plain name of a file
SHARDS = ".index.json"  # ending of a file that tells which file has which tensor
_KINDS = ".pt/.pth/.bin (torch.save), .safetensors, .npz or Flax's .msgpack"
_STATE_DICT = "Save only the model's state dict."


def _refused(path: Path, problem: str, advice: str) -> SaccadeError:
    """Return the error about a file."""
    return SaccadeError(f"{path}: {problem}. {advice}")


def read_tensors(
    path: Path, key: str | None = None, *, likely: str | None = None
) -> "dict[str, Tensor]":
    """Read the weights of a checkpoint by their names in the file; nested names are joined by '/'.

    `key` names the part of the file to read, such as teacher. Without it the part called `likely`
    is read if there is one, else the state dict is searched where training code puts it.

    Raises: SaccadeError if the file is missing, no checkpoint, needs unpickling, or has no `key`.
    """
    content = _content(path)
    _check_tree(path, content)
    if key is None and isinstance(content, Mapping) and likely in content:
        key = likely
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            keys = ", ".join(sorted(str(key) for key in content)[:10])
            advice = "Choose one that contains weights with --checkpoint-key."
            raise _refused(path, f"has no {key!r} at its top level, only {keys}", advice)
        content = content[key]
    state = _state_of(content)
    tensors = {}
    for name, value in _flat(path, state, "", _parts_of(state)):
        _check_size(path, name, value)
        tensors[name] = value
        if len(tensors) > limits.TENSORS:
            raise _refused(path, f"has more than {limits.TENSORS} tensors", _STATE_DICT)
    if not tensors:
        advice = "Pass the checkpoint that the authors' code saved."
        raise _refused(path, "contains no tensors", advice)
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    return tensors


def _content(path: Path) -> Any:
    if path.exists() and not path.is_file():
        kind, advice = "a pipe or a device", "Pass a checkpoint file."
        if path.is_dir():
            kind = "a folder"
            advice = "Save the parameters of an Orbax checkpoint with flax.serialization.to_bytes."
        raise _refused(path, f"found {kind}, expected a file: {_KINDS}", advice)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise _refused(path, "no such file", "Pass the authors' checkpoint.") from None
    except OSError as error:
        raise _refused(path, f"cannot be read ({error})", "Pass a checkpoint file.") from error
    if size == 0:
        raise Damaged(path, "the file is empty")
    _check_bytes(path, size)
    require("torch", extra="export")
    if path.name.endswith(SHARDS):
        return _from_shards(path)
    if head[:4] == b"PK\x03\x04":
        return _from_zip(path)
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return _from_torch(path)
    if head[8:9] == b"{":
        return _from_safetensors(path)
    if is_messages(head):
        return read_messages(path)
    raise _refused(path, "not a supported checkpoint", f"Expected {_KINDS}.")


def _check_bytes(path: Path, size: int) -> None:
    if size > limits.WEIGHTS_BYTES:
        problem = f"found {size} bytes of weights, expected at most {limits.WEIGHTS_BYTES}"
        raise _refused(path, problem, _STATE_DICT)


def _places(path: Path) -> Mapping[str, str]:
    """Return the file of each tensor, from an index of weights in several files.

    Raises: SaccadeError if it is not such an index, or names a file outside its folder or none.
    """
    places = read_json(path).get("weight_map")
    if not isinstance(places, Mapping) or not places:
        raise Damaged(path, "has no weight_map from tensors to files")
    files = {str(name) for name in places.values()}
    for name in sorted(files):
        if not _SHARD.fullmatch(name) or name.endswith(SHARDS):
            problem = f"names {name!r:.80}, expected files of weights in the same folder"
            raise Damaged(path, problem)
        if not (path.parent / name).is_file():
            advice = f"Copy all {len(files)} files of the weights there."
            raise _refused(path, f"names {name}, which is not in the folder", advice)
    return {str(name): str(place) for name, place in places.items()}


def shards_of(path: Path) -> tuple[Path, ...]:
    """Return the files that an index of weights in several files names, in order.

    Raises: SaccadeError if it is not such an index, or names a file outside its folder or none.
    """
    return tuple(path.parent / name for name in sorted({*_places(path).values()}))


def float32_bytes(path: Path) -> tuple[int, int]:
    """Return the size of the weights in float32, and that of their files, from headers alone.

    Only safetensors has such a header. Other files, and damaged ones, count as without weights.
    """
    weights = stored = 0
    for file in shards_of(path) if path.name.endswith(SHARDS) else (path,):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            size = file.stat().st_size
            with file.open("rb") as opened:
                length, first = int.from_bytes(opened.read(8), "little"), opened.read(1)
                rest = opened.read(min(length, limits.JSON_BYTES)) if first == b"{" else b""
            entries = parse_json((first + rest)[:length]) if rest else {}
            shapes = [entry["shape"] for name, entry in entries.items() if name != "__metadata__"]
            weights += 4 * sum(map(prod, shapes))
            stored += size
    return weights, stored


def _from_shards(path: Path) -> Any:
    places, files = _places(path), shards_of(path)
    _check_bytes(path, sum(file.stat().st_size for file in files))
    tensors: dict[str, Any] = {}
    for file in files:
        content = _state_of(_content(file))
        if not isinstance(content, Mapping):
            raise Damaged(file, "has no names of tensors")
        if twice := sorted(tensors.keys() & content.keys()):
            raise Damaged(file, f"has {twice[0]}, which another file of the weights has too")
        listed = {name for name, place in places.items() if place == file.name}
        if absent := sorted(listed - content.keys()):
            problem = f"lacks {absent[0]}, which {path.name} says it has ({len(absent)} such)"
            raise Damaged(file, f"{problem}: the files are from different saves")
        tensors |= content
    return tensors


def _from_zip(path: Path) -> Any:
    try:
        names = [entry.filename for entry in check_archive(path, limits.WEIGHTS_BYTES)]
    except (ArchiveRefused, OSError) as error:
        raise _damaged(path, error) from error
    if any(name.endswith("data.pkl") for name in names):
        return _from_torch(path)
    if not names or not all(name.endswith(".npy") for name in names):
        raise _refused(path, "a zip archive without weights", f"Expected {_KINDS}.")
    try:
        return read_arrays(path)
    except (ArchiveRefused, OSError) as error:
        problem = f"contains arrays that are damaged or of Python objects ({error})"
        raise _refused(path, problem, "Save plain arrays with numpy.savez.") from error


def _from_torch(path: Path) -> Any:
    import torch

    try:
        # The options of a run, which DINO and timm save with the weights, are plain data.
        return load_torch(path, torch.serialization.safe_globals([argparse.Namespace]))
    except NeedsCode as error:
        problem = f"needs unpickling, which runs code from the file ({_first_sentence(error)})"
        advice = "Where the file comes from, save only the weights: "
        advice += "torch.save(model.state_dict(), 'weights.pt')."
        raise _refused(path, problem, advice) from error
    except (TorchFileRefused, OSError) as error:
        raise _damaged(path, error) from error


def _first_sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if "GLOBAL" in line or "nsupported" in line]
    # After it, torch advises to allow the code, which is not wanted here.
    return (lines[0] if lines else text.splitlines()[0]).partition(". ")[0][:200]


def _from_safetensors(path: Path) -> Any:
    from safetensors import safe_open
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            check_entries(file.read(min(length, limits.JSON_BYTES + 1)))
        with safe_open(path, framework="pt") as file:
            ours = "saccade" in (file.metadata() or {})
        tensors = None if ours else load_file(path)
    except Exception as error:  # torch raises anything for a type or shape it lacks
        raise _damaged(path, error) from error
    if tensors is None:
        advice = f"Export it with: saccade export {path} --out FOLDER"
        raise _refused(path, "already a saccade checkpoint", advice)
    return tensors


def _damaged(path: Path, error: Exception) -> SaccadeError:
    return Damaged(path, f"truncated or damaged ({_first_sentence(error)})")


def _check_tree(path: Path, content: Any) -> None:
    """Check depth and width of the file's dictionaries; one reached twice counts twice."""
    level, count = [content], 0
    for _ in range(limits.PICKLE_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for inner in (value.values() if isinstance(value, Mapping) else value)
        ]
        count += len(level)
        if not level:
            return
        if count > limits.TREE_VALUES:
            break
    limit = f"{limits.PICKLE_DEPTH} deep or contains more than {limits.TREE_VALUES} values"
    raise _refused(path, f"nests more than {limit}", _STATE_DICT)


def _check_size(path: Path, name: str, value: "Tensor") -> None:
    """Check that all numbers are stored: a view can repeat one of them 10^13 times."""
    import torch

    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain:
        problem = f"{name[:100]} is a sparse, quantized or meta tensor, expected plain numbers"
        advice = "Save them with tensor.to_dense() or tensor.dequantize()."
        raise _refused(path, problem, advice)
    there = value.untyped_storage().nbytes()
    if value.dim() > limits.AXES or value.numel() * value.element_size() > max(there, 2**20):
        shape = f"{tuple(value.shape)!s:.80}"
        problem = f"{name[:100]} is a view of shape {shape} on {there} bytes"
        raise _refused(path, problem, "Save it with tensor.contiguous().")


def _state_of(content: Any) -> Any:
    """Descend through the containers to the one with the weights."""
    while isinstance(content, Mapping):
        inner = [content[name] for name in CONTAINERS if _holds_tensors(content.get(name))]
        optimizer = content.get("optimizer")
        if not inner and isinstance(optimizer, Mapping) and _holds_tensors(optimizer.get("target")):
            inner = [optimizer["target"]]  # Flax before 2022 trained the weights in there
        if not inner:
            return content
        content = inner[0]
    return content


def _parts_of(content: Any) -> str:
    """Describe the names at the top level of a file with several state dicts."""
    parts = [
        name
        for name, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(value, Mapping) and all(map(_is_array, value.values())) and value
    ]
    return f" (found {', '.join(map(str, parts))})" if parts else ""


def _holds_tensors(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(_holds_tensors(value) for value in content.values())
    return _is_array(content)


def _is_array(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor | np.ndarray)


def _flat(path: Path, content: Any, name: str, parts: str) -> "Iterator[tuple[str, Tensor]]":
    import torch

    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(path, value, f"{name}/{key}" if name else str(key), parts)
    elif isinstance(content, torch.Tensor):
        yield name, content.detach()
    elif isinstance(content, np.ndarray | np.generic | int | float):
        try:
            yield name, torch.from_numpy(np.array(content))
        except TypeError as error:
            kind = np.asarray(content).dtype
            raise Damaged(path, f"{name} contains {kind}, expected numbers") from error
    elif content is not None:
        problem = f"{name or 'the file'} is {type(content).__name__}, expected tensors"
        choice = f"choose the part with the weights by --checkpoint-key{parts}"
        raise _refused(path, problem, f"Pass a state dict, or {choice}.")
