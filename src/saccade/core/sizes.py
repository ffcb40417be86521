# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations in a form that people can read."""

from itertools import islice
from pathlib import Path

_MOST_FILES = 100_000  # the maximum that is counted


def files_below(place: Path) -> tuple[int, int]:
    """Return the number and total bytes of files in a folder, or of one file; ignore links."""
    paths = [place] if place.is_file() else islice(place.rglob("*"), _MOST_FILES)
    sizes = [path.stat().st_size for path in paths if path.is_file() and not path.is_symlink()]
    return len(sizes), sum(sizes)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 answer, 1,024 answers."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def size_text(count: int) -> str:
    """Return a size with its unit: 512 bytes, 3.4 KiB, 1.2 MiB."""
    if count < 1024:
        return counted(count, "byte")
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.5 or unit == "GiB":
            break
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration with its unit: 0.4 s, 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
