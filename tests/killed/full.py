# SPDX-License-Identifier: Apache-2.0
"""Full disks: a small tmpfs, or a file size limit if mounting is not allowed."""

import ctypes
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from clock import Moment
from commands import Command
from forks import Place, ProcessExit
from trial import FULL, Reference, Trial, lay_out

_NEW_MOUNTS, _PRIVATE, _REMOUNT = 0x20000, 1 << 18 | 1 << 14, 32
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def kind() -> str:
    """Return which of the two kinds this process can use."""
    private = _libc.unshare(_NEW_MOUNTS) == 0 and _mount(b"none", b"/", None, _PRIVATE, None)
    return "tmpfs" if private else "RLIMIT_FSIZE, and ENOSPC at events"


@dataclass(frozen=True)
class Disk:
    """A file system of a few pages for all folders of a trial."""

    pages: int

    def run(
        self, trial: Trial, given: Path, place: Place, expected: Reference
    ) -> tuple[ProcessExit, list[str]]:
        """Run the trial on it; the next run has enough space."""
        place.root.mkdir(parents=True)
        target = os.fsencode(place.root)
        size = f"size={64 << 20}".encode()
        if not _mount(b"none", target, b"tmpfs", 0, size):
            raise OSError(ctypes.get_errno(), "mount")
        try:
            lay_out(trial.command, given, place, old=trial.old)
            (place.root / "ballast").write_bytes(b"1")  # size 0 would mean no limit
            used = os.statvfs(place.root)
            taken = used.f_blocks - used.f_bfree
            small = f"size={(taken + self.pages) * _PAGE}".encode()
            _mount(b"none", target, b"tmpfs", _REMOUNT, small)
            make_room = partial(_mount, b"none", target, b"tmpfs", _REMOUNT, size)
            return trial.run_laid_out(given, place, expected, make_room)
        finally:
            _libc.umount2(target, 2)


@dataclass(frozen=True)
class NoDisk:
    """Without a mount: the trial has a file size limit, or ENOSPC at its moment."""

    def run(
        self, trial: Trial, given: Path, place: Place, expected: Reference
    ) -> tuple[ProcessExit, list[str]]:
        """Run the trial."""
        return trial.run(given, place, expected)


def trial(
    command: Command, expected: Reference, index: int, planned: int
) -> tuple[Trial, "Disk | NoDisk"]:
    """Return the `index`-th of the planned full disks: from no space at all to nearly enough."""
    share = index / planned
    old = index % 2 == 1 and command.replaces
    if kind() == "tmpfs":
        disk = Disk(int(share * expected.pages))
        return Trial(command, Moment("none", 0, FULL), old), disk
    if index % 2:
        number = 1 + int(share * max(1, expected.events // 2))
        return Trial(command, Moment("file", number, FULL), old), NoDisk()
    limit = _limited(int(share * expected.largest) + 1)
    return Trial(command, Moment("none", 0, FULL), old, limit), NoDisk()


def _limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _mount(
    source: bytes, target: bytes, what: bytes | None, flags: int, data: bytes | None
) -> bool:
    return bool(_libc.mount(source, target, what, flags, data) == 0)
