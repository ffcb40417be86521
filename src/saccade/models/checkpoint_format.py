# SPDX-License-Identifier: Apache-2.0
"""The bytes of a checkpoint: safetensors with one JSON header, and what else a file may be."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from saccade import limits
from saccade.errors import SaccadeError, require
from saccade.files import check_labels
from saccade.json_text import JSONRefused, parse_json
from saccade.schema import WrongValue, typed, words

if TYPE_CHECKING:
    import torch

SCHEMA = "saccade.checkpoint"
VERSION = 3
# 1 held images and labels only, under other names; 1 and 2 squashed every image.
READ_VERSIONS = (1, 2, 3)


@dataclass(frozen=True)
class Header:
    """Header that stands beside the tensors."""

    schema: str
    version: int
    family: str
    config: dict[str, Any]
    preprocessing: dict[str, Any] | None
    labels: tuple[str, ...]
    card: dict[str, Any]
    data_sha256: str


def pack(tensors: dict[str, "torch.Tensor"], header: dict[str, Any]) -> bytes:
    """The bytes of a file; the same content gives the same ones."""
    from safetensors.torch import save as serialize

    # One metadata key only: safetensors writes several in the order of a random hash.
    bare = serialize(tensors)
    header = header | {"data_sha256": _data_sha256(bare)}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return serialize(tensors, metadata={"saccade": text})


def _header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _header(data: bytes) -> bytes:
    """The JSON in front, or of a longer one so much that its length is refused."""
    return data[8 : 8 + min(_header_bytes(data), limits.JSON_BYTES + 1)]


def _data_sha256(data: bytes) -> str:
    return hashlib.sha256(memoryview(data)[8 + _header_bytes(data) :]).hexdigest()


def unpack(path: Path, data: bytes) -> dict[str, "torch.Tensor"]:
    """The tensors of a file.

    Raises: SaccadeError that says what the file is instead.
    """
    require("torch", extra="export")
    from safetensors.torch import load as deserialize

    try:
        check_entries(_header(data))
        return deserialize(data)
    except EntriesRefused as error:
        raise SaccadeError(f"{path}: {error}. Copy it again from its source.") from error
    except Exception as error:  # whatever torch makes of a type or a shape that it has not
        raise SaccadeError(f"{path}: {_diagnosis(data)}") from error


class EntriesRefused(ValueError):
    """A header of more or stranger tensors than any model has."""


def check_entries(header: bytes) -> None:
    """The header of a safetensors file, as far as its tensors' names and shapes go.

    What is no such header at all is left to the library, which finds the same.

    Raises: EntriesRefused if there are more tensors, axes, numbers or letters than `limits` allows.
    """
    try:
        entries = parse_json(header)
    except JSONRefused as error:
        raise EntriesRefused(f"its header is larger than any model's ({error})") from error
    except ValueError:
        return
    if not isinstance(entries, dict):
        return
    if len(entries) > limits.TENSORS:
        raise EntriesRefused(f"has {len(entries)} tensors, expected at most {limits.TENSORS}")
    for name, entry in entries.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if name == "__metadata__" or not isinstance(shape, list):
            continue
        numbers = all(type(size) is int and 0 <= size <= limits.PARAMETERS for size in shape)
        if len(shape) > limits.AXES or not numbers or len(name) > limits.NAME_CHARACTERS:
            raise EntriesRefused(
                f"tensor {name!r:.80} has {len(shape)} axes, {shape!r:.80}, expected at most "
                f"{limits.AXES} and sizes and a name of an ordinary length"
            )


def _diagnosis(data: bytes) -> str:
    retrain = "Copy it again from its source, or train a new one with: saccade train"
    if not data:
        return f"the file is empty. {retrain}"
    if data[:4] == b"PK\x03\x04" or (data[0] == 0x80 and data[1:2] in b"\x02\x03\x04\x05"):
        kind = "a zip archive, as torch.save writes" if data[0] != 0x80 else "a Python pickle"
        return (
            f"found {kind}, expected a safetensors file; saccade runs no code from a checkpoint. "
            "Convert it once with: saccade convert SOURCE FILE --out NAME.safetensors"
        )
    start = 8 + _header_bytes(data)
    try:
        entries = parse_json(_header(data))
        end = start + max(v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        cut = data[8:9] == b"{" and len(data) < start
        end = start if cut else 0
    if end > len(data):
        return f"the file is truncated: found {len(data)} bytes, its header wants {end}. {retrain}"
    return f"found a file that is not safetensors, or a corrupt one. {retrain}"


def read_header(path: Path, data: bytes) -> Header:
    """Header that stands beside the tensors.

    Raises: SaccadeError for another format or version, or tensors that were changed.
    """
    metadata = parse_json(_header(data)).get("__metadata__") or {}
    if "saccade" not in metadata:
        raise SaccadeError(
            f"{path}: a safetensors file without saccade's metadata (found "
            f"{sorted(metadata)!r:.200}). "
            "Weights of another project are converted with: saccade convert SOURCE FILE"
        )
    try:
        header = parse_json(metadata["saccade"])
        version = (header["schema"], header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise SaccadeError(f"{path}: corrupt metadata ({error}). Copy the file again.") from error
    if version not in [(SCHEMA, version) for version in READ_VERSIONS]:
        raise SaccadeError(
            f"{path}: found {version[0]!s:.100} version {version[1]!s:.100}, expected {SCHEMA} "
            f"version {VERSION}. Use the version of saccade that wrote it, or train again."
        )
    kinds = get_type_hints(Header)
    if header.keys() != kinds.keys():
        raise SaccadeError(
            f"{path}: metadata keys missing {sorted(kinds.keys() - header.keys())}, unknown "
            f"{sorted(header.keys() - kinds.keys())!r:.200}. Train the checkpoint again with this "
            "version."
        )
    if header["data_sha256"] != _data_sha256(data):
        raise SaccadeError(
            f"{path}: corrupt, the tensors do not have the SHA-256 that the file states. "
            "Copy it again from its source."
        )
    found = {key: _checked(path, key, kind, header[key]) for key, kind in kinds.items()}
    check_labels(found["labels"], str(path))
    return Header(**found)


def _checked(path: Path, key: str, kind: Any, value: Any) -> Any:
    try:
        return typed(kind, value, "")
    except WrongValue as error:
        raise SaccadeError(
            f"{path}: {key} is {value!r:.100}, expected {words(kind)}. Train the checkpoint again "
            "with this version."
        ) from error
