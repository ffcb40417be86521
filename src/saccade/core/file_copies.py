# SPDX-License-Identifier: Apache-2.0
"""Copies of large files that share blocks with the original where the file system can.

A hard link would be as cheap, but writing to one name would change the other, and the ONNX checker
refuses weights with several names.
"""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from saccade.core.sizes import size_text

_FICLONE = 0x40049409  # linux/fs.h: share the blocks of a file until one of the two is written
_CHUNK = 1 << 20


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new one.

    Raises: OSError if it cannot be read or written, before anything is written if the disk lacks
        the space.
    """
    with source.open("rb") as reader, target.open("xb") as writer:
        copy_opened(reader, writer)


def copy_opened(reader: BinaryIO, writer: BinaryIO, expected: int = 0) -> None:
    """Copy an opened file to an empty one.

    Units: expected is the number of bytes that this copy and those after it need together.
    Raises: as `copy_file`.
    """
    size = os.fstat(reader.fileno()).st_size
    if _clone(reader, writer):
        return
    _require_room(writer, max(expected, size))
    # Copy no more than the initial size: a file may grow faster than it is read.
    while size and (data := reader.read(min(_CHUNK, size))):
        writer.write(data)
        size -= len(data)
    writer.flush()


def _clone(reader: BinaryIO, writer: BinaryIO) -> bool:
    """Share the file's blocks where the file system can (Btrfs, XFS, bcachefs)."""
    try:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    except OSError:
        return False  # another file system, or one that does not support it
    return True


def _require_room(writer: BinaryIO, needed: int) -> None:
    free = shutil.disk_usage(writer.fileno()).free
    if needed > free:
        text = f"the models need {size_text(needed)} more, but only {size_text(free)} are free"
        raise OSError(errno.ENOSPC, text)
