# SPDX-License-Identifier: Apache-2.0
"""The bytes of a checkpoint: safetensors with one JSON header, and what else a file may be."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.plugins.errors import SaccadeError, require

if TYPE_CHECKING:
    import torch

SCHEMA = "saccade.checkpoint"
VERSION = 3
# 1 held images and labels only, under other names; 1 and 2 squashed every image.
READ_VERSIONS = (1, 2, 3)
_KEYS = {"schema", "version", "family", "config", "preprocessing", "labels", "card", "data_sha256"}


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


def _data_sha256(data: bytes) -> str:
    return hashlib.sha256(memoryview(data)[8 + _header_bytes(data) :]).hexdigest()


def unpack(path: Path, data: bytes) -> dict[str, "torch.Tensor"]:
    """The tensors of a file.

    Raises: SaccadeError that says what the file is instead.
    """
    require("torch", extra="export")
    from safetensors import SafetensorError
    from safetensors.torch import load as deserialize

    try:
        return deserialize(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise SaccadeError(f"{path}: {_diagnosis(data)}") from error


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
        entries = json.loads(data[8:start])
        end = start + max(v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        cut = data[8:9] == b"{" and len(data) < start
        end = start if cut else 0
    if end > len(data):
        return f"the file is truncated: found {len(data)} bytes, its header wants {end}. {retrain}"
    return f"found a file that is not safetensors, or a corrupt one. {retrain}"


def read_header(path: Path, data: bytes) -> dict[str, Any]:
    """What stands beside the tensors.

    Raises: SaccadeError for another format or version, or tensors that were changed.
    """
    metadata = json.loads(data[8 : 8 + _header_bytes(data)]).get("__metadata__") or {}
    if "saccade" not in metadata:
        raise SaccadeError(
            f"{path}: a safetensors file without saccade's metadata (found {sorted(metadata)}). "
            "Weights of another project are converted with: saccade convert SOURCE FILE"
        )
    try:
        header = json.loads(metadata["saccade"])
        found = (header["schema"], header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise SaccadeError(f"{path}: corrupt metadata ({error}). Copy the file again.") from error
    if found not in [(SCHEMA, version) for version in READ_VERSIONS]:
        raise SaccadeError(
            f"{path}: found {found[0]} version {found[1]}, expected {SCHEMA} version {VERSION}. "
            "Use the version of saccade that wrote it, or train again."
        )
    if set(header) != _KEYS:
        raise SaccadeError(
            f"{path}: metadata keys missing {sorted(_KEYS - set(header))}, unknown "
            f"{sorted(set(header) - _KEYS)}. Train the checkpoint again with this version."
        )
    if header["data_sha256"] != _data_sha256(data):
        raise SaccadeError(
            f"{path}: corrupt, the tensors do not have the SHA-256 that the file states. "
            "Copy it again from its source."
        )
    return header
