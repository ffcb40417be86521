# SPDX-License-Identifier: Apache-2.0
"""Zip archives of arrays, read only after their claimed sizes have been checked."""

import io
import math
import struct
import zipfile
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from saccade.core import limits
from saccade.core.files import FileRefused

if TYPE_CHECKING:
    import numpy as np

_END, _END_64 = b"PK\x05\x06", b"PK\x06\x06"
_END_BYTES, _END_64_BYTES = 22, 56 + 20  # the 64-bit record and the locator that points to it
_MOST_COMMENT = 2**16


class ArchiveRefused(ValueError):
    """The file is not an archive that can be read here; the message contains the reason."""


def check_archive(path: Path, limit: int) -> list[zipfile.ZipInfo]:
    """Return the entries of a zip archive that unpacks to at most `limit` bytes.

    Raises: ArchiveRefused, before anything is unpacked; OSError if the file cannot be read.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise FileRefused("found a pipe or device, expected a file")
    if (directory := _directory_bytes(path, size)) > limits.ARCHIVE_DIRECTORY_BYTES:
        raise ArchiveRefused(
            f"its directory has {directory} bytes, expected at most "
            f"{limits.ARCHIVE_DIRECTORY_BYTES}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds for a damaged directory
        raise ArchiveRefused(f"its directory is damaged ({error!r:.100})") from error
    if len(entries) > limits.ARCHIVE_FILES:
        raise ArchiveRefused(f"found {len(entries)} files, expected at most {limits.ARCHIVE_FILES}")
    if len({entry.filename for entry in entries}) < len(entries):
        raise ArchiveRefused("two of its files have the same name")
    unpacked = sum(entry.file_size for entry in entries)
    most = min(limit, most_unpacked(size))
    if unpacked > most:
        raise ArchiveRefused(
            f"unpacks to {unpacked} bytes, at most {most} are allowed for a file of {size} bytes"
        )
    return entries


def most_unpacked(size: int) -> int:
    """Return the number of bytes that a file of this size may unpack to."""
    return max(limits.ARCHIVE_FREE_BYTES, limits.ARCHIVE_RATIO * size)


def _directory_bytes(path: Path, size: int) -> int:
    """Return the directory's size as the end of the file claims it; zipfile reads all of it."""
    with path.open("rb") as file:
        file.seek(max(0, size - _END_BYTES - _END_64_BYTES - _MOST_COMMENT))
        tail = file.read(_END_BYTES + _END_64_BYTES + _MOST_COMMENT)
    sizes = [0]
    # Check every marker, even inside a comment, because readers differ in which one they follow.
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
    """Return the arrays in an .npz file: all of them, or those of `names` that exist.

    Raises: ArchiveRefused if the file is not an .npz, is damaged, contains Python objects or an
        incomplete array; OSError if it cannot be read.
    """
    entries = check_archive(path, limit)
    if strange := [entry.filename for entry in entries if not entry.filename.endswith(".npy")]:
        raise ArchiveRefused(f"contains {strange[0]!r:.80}, expected arrays (.npy) only")
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if names is None or name in names:
                    arrays[name] = _array(archive, entry)
    except (ArchiveRefused, OSError):
        raise
    except Exception as error:  # zlib, lzma, zipfile and NumPy raise a dozen kinds for damage
        raise ArchiveRefused(f"is damaged ({error!r:.100})") from error
    return arrays


def array_names(path: Path, limit: int = limits.WEIGHTS_BYTES) -> tuple[str, ...]:
    """Return the names of the arrays in an .npz file.

    Raises: ArchiveRefused if it is not an .npz; OSError if it cannot be read.
    """
    return tuple(entry.filename.removesuffix(".npy") for entry in check_archive(path, limit))


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> "np.ndarray":
    with archive.open(entry) as file:
        return read_array(file, entry.filename, entry.file_size)


def read_array(file: IO[bytes], name: str, size: int) -> "np.ndarray":
    """Return the array in an .npy file of this size, which can be read from its beginning again.

    Raises: ArchiveRefused if it contains Python objects or another number of values than it claims;
        other exceptions of NumPy if it is damaged.
    """
    npy: Any = import_module("numpy.lib.format")
    most = limits.ARRAY_HEADER_BYTES
    start = io.BytesIO(file.read(most + 16))  # a longer header is cut off
    version = npy.read_magic(start)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ArchiveRefused(f"{name!r:.80} has format {version}, expected 1 or 2")
    shape, _, dtype = read(start, max_header_size=most)
    if dtype.hasobject:
        raise ArchiveRefused(f"{name!r:.80} contains Python objects, expected numbers")
    if len(shape) > limits.AXES or math.prod(shape) > limits.PARAMETERS:
        raise ArchiveRefused(f"{name!r:.80} claims the shape {shape!r:.80}")
    wanted, there = math.prod(shape) * dtype.itemsize, size - start.tell()
    if wanted != there or min(shape, default=0) < 0 or (dtype.itemsize == 0 and shape):
        raise ArchiveRefused(
            f"{name!r:.80} claims {shape!r:.80} of {dtype}, {wanted} bytes, and has {there}"
        )
    file.seek(0)
    array: np.ndarray = npy.read_array(file, allow_pickle=False, max_header_size=most)
    if dtype.kind == "U":  # NumPy accepts any code point in a string, but Python cannot encode all
        "".join(array.ravel().tolist()).encode()
    return array
