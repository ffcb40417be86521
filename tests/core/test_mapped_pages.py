# SPDX-License-Identifier: Apache-2.0
"""The memory of a mapped file is given back, but never what was written to it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from saccade.core.mapped_pages import return_pages

SIZE = 2**22
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/pagemap")


def mapped(path: Path, mode: str = "c") -> np.ndarray:
    """Map a file of random bytes; by default, what is written to the array is the process's own."""
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return np.memmap(path, np.uint8, mode)  # type: ignore[call-overload]


def resident(array: np.ndarray) -> int:
    """Return the resident KiB of the mapping that contains an array."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= array.ctypes.data < end
        elif inside and words[0] == "Rss:":
            return int(words[1])
    raise AssertionError("not mapped")


@linux
def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    array = mapped(tmp_path / "file")
    total = int(array.sum(dtype=np.int64))
    assert resident(array) >= SIZE // 1024
    half = array[: SIZE // 2]
    assert return_pages(half.ctypes.data, half.nbytes)
    assert resident(array) <= SIZE // 2048
    assert int(array.sum(dtype=np.int64)) == total


@linux
def test_what_was_written_stays(tmp_path: Path) -> None:
    array = mapped(tmp_path / "file")
    array[SIZE // 2] += 1
    changed = array.copy()
    assert not return_pages(array.ctypes.data, array.nbytes)
    np.testing.assert_array_equal(array, changed)


def test_memory_of_no_file_stays() -> None:
    array = np.ones(SIZE, np.uint8)
    assert not return_pages(array.ctypes.data, array.nbytes)
    assert array.all()


def test_a_part_of_a_page_is_nothing(tmp_path: Path) -> None:
    array = mapped(tmp_path / "file")
    assert not return_pages(array.ctypes.data + 1, 100)


@linux
def test_a_loaded_checkpoint_is_not_in_memory(tmp_path: Path) -> None:
    import torch

    from saccade.models.checkpoint import check_finite

    path = tmp_path / "file"
    np.ones(SIZE // 4, np.float32).tofile(path)
    array = np.memmap(path, np.float32, "c")
    check_finite("it", {"weight": torch.from_numpy(array)})
    assert resident(array) < SIZE // 2048
    assert array.sum() == len(array)
