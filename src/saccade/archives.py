# SPDX-License-Identifier: Apache-2.0
"""Zip archives of arrays: what they claim is compared with what they can hold, then read."""

import io
import math
import struct
import zipfile
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade import limits
from saccade.files import FileRefused

if TYPE_CHECKING:
    import numpy as np

_END, _END_64 = b"PK\x05\x06", b"PK\x06\x06"
_END_BYTES, _END_64_BYTES = 22, 56 + 20  # of the wide record with what points to it
_MOST_COMMENT = 2**16


class ArchiveRefused(ValueError):
    """The file is not an archive that is read here; the message says why."""


def check_archive(path: Path, limit: int) -> list[zipfile.ZipInfo]:
    """The entries of a zip archive that unpacks to no more than `limit` bytes.

    Raises: ArchiveRefused before anything is unpacked, OSError if the file cannot be read.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise FileRefused("found a pipe or device, expected a file")
    if (directory := _directory_bytes(path, size)) > limits.ARCHIVE_DIRECTORY_BYTES:
        raise ArchiveRefused(
            f"its directory has {directory} bytes, at most {limits.ARCHIVE_DIRECTORY_BYTES} are "
            "read"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # whatever a damaged directory makes of zipfile
        raise ArchiveRefused(f"its directory is damaged ({error!r:.100})") from error
    if len(entries) > limits.ARCHIVE_FILES:
        raise ArchiveRefused(f"{len(entries)} files, at most {limits.ARCHIVE_FILES} are read")
    if len({entry.filename for entry in entries}) < len(entries):
        raise ArchiveRefused("two of its files have the same name")
    unpacked = sum(entry.file_size for entry in entries)
    most = min(limit, max(limits.ARCHIVE_FREE_BYTES, limits.ARCHIVE_RATIO * size))
    if unpacked > most:
        raise ArchiveRefused(
            f"unpacks to {unpacked} bytes, at most {most} are read from {size} bytes"
        )
    return entries


def _directory_bytes(path: Path, size: int) -> int:
    """Size of the directory by the end of the file; zipfile reads all of it."""
    with path.open("rb") as file:
        file.seek(max(0, size - _END_BYTES - _END_64_BYTES - _MOST_COMMENT))
        tail = file.read(_END_BYTES + _END_64_BYTES + _MOST_COMMENT)
    sizes = [0]
    # Every mark counts, also one in a comment: which one a reader follows is the reader's choice.
    for mark, layout, offset in ((_END, "<L", 12), (_END_64, "<Q", 40)):
        at = tail.find(mark)
        while at >= 0:
            if at + offset + struct.calcsize(layout) <= len(tail):
                (length,) = struct.unpack_from(layout, tail, at + offset)
                sizes.append(length if length != 0xFFFFFFFF else 0)
            at = tail.find(mark, at + 1)
    return min(max(sizes), size)


def read_arrays(
    path: Path, names: Collection[str] | None = None, limit: int = limits.WEIGHTS_BYTES
) -> "dict[str, np.ndarray]":
    """The arrays of an .npz, all of them or those of `names` that are there.

    Raises: ArchiveRefused if it is no .npz, damaged, holds Python objects, or an array whose
        numbers are not all there; OSError if the file cannot be read.
    """
    entries = check_archive(path, limit)
    if strange := [entry.filename for entry in entries if not entry.filename.endswith(".npy")]:
        raise ArchiveRefused(f"holds {strange[0]!r:.80}, expected arrays (.npy) alone")
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if names is None or name in names:
                    arrays[name] = _array(archive, entry)
    except (ArchiveRefused, OSError):
        raise
    except Exception as error:  # zlib, lzma, zipfile and NumPy have a dozen kinds for damage
        raise ArchiveRefused(f"is damaged ({error!r:.100})") from error
    return arrays


def array_names(path: Path, limit: int = limits.WEIGHTS_BYTES) -> tuple[str, ...]:
    """The names of the arrays of an .npz.

    Raises: ArchiveRefused if it is none, OSError if the file cannot be read.
    """
    return tuple(entry.filename.removesuffix(".npy") for entry in check_archive(path, limit))


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> "np.ndarray":
    npy: Any = import_module("numpy.lib.format")
    most = limits.ARRAY_HEADER_BYTES
    with archive.open(entry) as file:
        start = io.BytesIO(file.read(most + 16))  # a longer header ends before its own end
        version = npy.read_magic(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ArchiveRefused(f"{entry.filename!r:.80} has format {version}, expected 1 or 2")
        shape, _, dtype = read(start, max_header_size=most)
        if dtype.hasobject:
            raise ArchiveRefused(f"{entry.filename!r:.80} holds Python objects, expected numbers")
        if len(shape) > limits.AXES or math.prod(shape) > limits.PARAMETERS:
            raise ArchiveRefused(f"{entry.filename!r:.80} claims the shape {shape!r:.80}")
        wanted, there = math.prod(shape) * dtype.itemsize, entry.file_size - start.tell()
        if wanted != there or min(shape, default=0) < 0 or (dtype.itemsize == 0 and shape):
            raise ArchiveRefused(
                f"{entry.filename!r:.80} claims {shape!r:.80} of {dtype}, {wanted} bytes, and has "
                f"{there}"
            )
        file.seek(0)
        array: np.ndarray = npy.read_array(file, allow_pickle=False, max_header_size=most)
    if dtype.kind == "U":  # NumPy makes texts of any number, of which Python then fails to
        "".join(array.ravel().tolist()).encode()
    return array
