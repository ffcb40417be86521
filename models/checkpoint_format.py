# SPDX-License-Identifier: Apache-2.0
"""The bytes of a checkpoint (safetensors with one JSON header), and messages for other files."""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core import limits
from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.files import check_labels, check_regular, sha256_of
from saccade.core.json_text import JSONRefused, parse_json
from saccade.core.schema import AGAIN, typed

if TYPE_CHECKING:
    import torch

Bytes = bytes | mmap.mmap
SCHEMA = "saccade.checkpoint"
VERSION = 3
AUTHORS_DATA = "the authors'"  # the card's `data` in what `convert` writes
GENERATED_DATA = ("digits", "digits-sum", "shapes", "signs", "tetrominoes", "listops")
_PICKLE_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")
# Version 1 had only images and labels, under other names; 1 and 2 squashed every image.
READ_VERSIONS = (1, 2, 3)


@dataclass(frozen=True)
class Header:
    """The JSON header that a checkpoint stores with its tensors."""

    schema: str
    version: int
    family: str
    config: dict[str, Any]
    preprocessing: dict[str, Any] | None
    labels: tuple[str, ...]
    card: dict[str, Any]
    data_sha256: str


def write_tensors(path: Path, tensors: dict[str, "torch.Tensor"], header: dict[str, Any]) -> None:
    """Write a checkpoint; the same content gives the same bytes.

    The tensors are written from where they are, without a copy in memory.

    Raises: OSError if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Use a single metadata key: safetensors writes several in the order of a random hash.
    unknown = hashlib.sha256(header_json(header).encode()).hexdigest()  # as long as the real one
    try:
        save_file(tensors, path, {"saccade": header_json(header | {"data_sha256": unknown})})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    with path.open("r+b") as file:
        start = 8 + _header_bytes(file.read(8))
        at = file.read(start).index(unknown.encode())
        digest = _sha256_from(path, start)
        file.seek(8 + at)
        file.write(digest.encode())


def header_json(header: Mapping[str, Any]) -> str:
    """Return the text of a header as it is stored; equal headers give equal texts."""
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _header_bytes(data: Bytes) -> int:
    return int.from_bytes(data[:8], "little")


def header_text(data: Bytes) -> bytes:
    """Return the leading JSON; if it is too long, just enough for it to be refused."""
    return data[8 : 8 + min(_header_bytes(data), limits.JSON_BYTES + 1)]


def _sha256_from(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(path: Path) -> tuple[str, str]:
    """Return the SHA-256 of a whole safetensors file, and of its data, computed side by side."""
    with path.open("rb") as file:
        starts = (0, 8 + _header_bytes(file.read(8)))
    with ThreadPoolExecutor(len(starts)) as threads:
        whole, data = threads.map(lambda start: _sha256_from(path, start), starts)
    return whole, data


def mapped_tensors(path: Path) -> dict[str, "torch.Tensor"]:
    """Return the tensors of a file; their memory is the file's until it is written to.

    Raises: SaccadeError if it is not a safetensors file; the message says what it is instead.
    """
    require("torch", extra="export")
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:  # torch raises anything for a type or shape it lacks
        with mapped(path) as data:
            raise _diagnosis(path, data) from error


@contextmanager
def mapped(path: Path) -> Iterator[Bytes]:
    """Yield the bytes of a file, which are read when they are accessed.

    Raises: OSError if it cannot be read.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def refuse_foreign(path: Path) -> None:
    """Refuse a file whose first bytes show that it is not a saccade checkpoint.

    A file that is missing or cannot be read is left to the caller that opens it.
    Raises: SaccadeError naming the kind of file, and the command that converts it.
    """
    try:
        check_regular(path, limits.WEIGHTS_BYTES)
        with path.open("rb") as file:
            data = file.read(16)
    except OSError:
        return
    if _is_torch_file(data):
        raise _diagnosis(path, data)


def _is_torch_file(data: Bytes) -> bool:
    return data[:4] == b"PK\x03\x04" or (data[:1] == b"\x80" and data[1:2] in _PICKLE_PROTOCOLS)


def is_foreign(path: Path) -> bool:
    """Return True if a file has weights, but not saccade's metadata.

    A file that is missing, damaged or cannot be read is left to the caller that reads it.
    """
    if not path.is_file():
        return False
    try:
        with mapped(path) as data:
            return _is_torch_file(data) or "saccade" not in _metadata(path, data)
    except (OSError, ValueError, SaccadeError):
        return False


class EntriesRefused(ValueError):
    """A header whose tensors are more numerous or stranger than any model's."""


def check_entries(header: bytes) -> None:
    """Check the names and shapes of the tensors in a safetensors header.

    Anything that is not such a header passes: the library refuses it later.

    Raises: EntriesRefused if tensors, axes, numbers or characters exceed `limits`.
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
                f"{limits.AXES} axes, and sizes and a name of an ordinary length"
            )


def _diagnosis(path: Path, data: Bytes) -> SaccadeError:
    train = "saccade train"
    if not data:
        return Damaged(path, "the file is empty", train)
    if _is_torch_file(data):
        kind = "a zip archive, as torch.save writes" if data[0] != 0x80 else "a Python pickle"
        return SaccadeError(
            f"{path}: found {kind}, expected a safetensors file. saccade runs no code from a "
            "checkpoint. Convert it once with: saccade convert SOURCE FILE --out NAME.safetensors"
        )
    start = 8 + _header_bytes(data)
    try:
        entries = parse_json(header_text(data))
        end = start + max(v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        cut = data[8:9] == b"{" and len(data) < start
        end = start if cut else 0
    if end > len(data):
        why = f"the file is truncated: found {len(data)} bytes, its header needs {end}"
        return Damaged(path, why, train)
    return Damaged(path, "found a file that is not safetensors, or a corrupt one", train)


def read_header(path: Path, data: Bytes) -> Header:
    """Read the header of a checkpoint, without torch.

    Raises: SaccadeError if it is another kind of file, or of another version.
    """
    metadata = _metadata(path, data)
    if "saccade" not in metadata:
        raise SaccadeError(
            f"{path}: found a safetensors file without saccade's metadata. "
            "Convert weights of another project with: saccade convert SOURCE FILE "
            "--out NAME.safetensors"
        )
    return parsed_header(path, metadata["saccade"])


def parsed_header(path: Path, text: Any) -> Header:
    """Return the header of a text from `header_json`, checked.

    Raises: SaccadeError if it is of another version, or has other keys or types.
    """
    try:
        header = parse_json(text)
        version = (header["schema"], header["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(path, f"corrupt metadata ({error})") from error
    if version not in [(SCHEMA, version) for version in READ_VERSIONS]:
        raise SaccadeError(
            f"{path}: found {version[0]!s:.100} version {version[1]!s:.100}, expected {SCHEMA} "
            f"version {VERSION}. Use the version of saccade that wrote it, or train the checkpoint "
            "again."
        )
    try:
        checked: Header = typed(Header, header, "")
    except SaccadeError as error:
        raise SaccadeError(
            f"{path}: {str(error).removesuffix(AGAIN)}Train the checkpoint again with this version."
        ) from error
    check_labels(checked.labels, str(path))
    return checked


def header_of(path: Path) -> Header:
    """Return the header of a checkpoint file without reading its tensors.

    Raises: SaccadeError if it is another kind of file; OSError, ValueError if it cannot be read.
    """
    with mapped(path) as data:
        return read_header(path, data)


def checked_sha256(path: Path, header: Header) -> str:
    """Return the SHA-256 of a checkpoint file after checking its tensors, read once.

    Raises: SaccadeError if the tensors are not those that were written.
    """
    whole, data = digests(path)
    if header.data_sha256 != data:
        raise Damaged(path, "corrupt, the tensors do not have the SHA-256 recorded in the file")
    return whole


def safetensors_sha256(path: Path) -> str:
    """Return the SHA-256 of a safetensors file after checking its length and its tensors.

    Raises: SaccadeError if it is truncated, or a checkpoint with other tensors than recorded.
    """
    with mapped(path) as data:
        metadata = _metadata(path, data)
        header = read_header(path, data) if "saccade" in metadata else None
    return sha256_of(path) if header is None else checked_sha256(path, header)


def _metadata(path: Path, data: Bytes) -> dict[str, Any]:
    try:
        check_entries(header_text(data))
        entries = parse_json(header_text(data))
        metadata = entries.get("__metadata__") or {}
        whole = all(
            _header_bytes(data) + 8 + entry["data_offsets"][1] <= len(data)
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except EntriesRefused as error:
        raise Damaged(path, str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _diagnosis(path, data) from error
    texts = isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())
    if not whole or not texts:
        raise _diagnosis(path, data)
    return metadata
