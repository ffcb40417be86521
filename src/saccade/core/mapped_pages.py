# SPDX-License-Identifier: Apache-2.0
"""Give back the memory of parts of a mapped file that were read."""

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# Bits of an entry of /proc/self/pagemap, one per page.
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def return_pages(address: int, length: int) -> bool:
    """Give back the whole pages of a mapped file in this range; the next access reads them again.

    If any of it is not a file's, or was written to, nothing happens, as on systems other than
    Linux. Returns whether memory was given back.

    Units: bytes.
    """
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else length + 1
    start, end = -(-address // page), (address + length) // page
    if start >= end:
        return False
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(8 * start)
            entries = np.frombuffer(file.read(8 * (end - start)), np.uint64)
    except OSError:
        return False
    here = entries[(entries & (_PRESENT | _SWAPPED)) != 0]
    if len(entries) != end - start or not len(here):
        return False
    if np.any(here & _SWAPPED) or not np.all(here & _OF_A_FILE):
        return False  # the system would forget what was written
    where = ctypes.c_void_p(start * page), ctypes.c_size_t((end - start) * page)
    return bool(ctypes.CDLL(None).madvise(*where, mmap.MADV_DONTNEED) == 0)


def return_tensor(tensor: "Tensor") -> None:
    """Give back the pages of a tensor whose memory is a mapped file's, after it was read."""
    if tensor.is_contiguous():
        return_pages(tensor.data_ptr(), tensor.nbytes)
