# SPDX-License-Identifier: Apache-2.0
"""Renames of which no moment shows a half: into a place that is free, or in exchange."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def rename_into_free(source: Path, target: Path) -> None:
    """Raises: FileExistsError if anything stands at `target`."""
    try:
        _renameat2(source, target, _NO_REPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        # A file system without it: between the look and the rename another may come.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)


def exchange(one: Path, other: Path) -> None:
    """Each takes the name of the other in one step.

    Raises: OSError if one is missing, or the file system cannot do it (`cannot_exchange`).
    """
    _renameat2(one, other, _EXCHANGE)


def cannot_exchange(error: OSError) -> bool:
    """Whether that error of `exchange` says that this file system has no such step."""
    return error.errno in _UNKNOWN


def _renameat2(source: Path, target: Path, flags: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    found = call(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)
    )
    if found:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))
