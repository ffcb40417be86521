# SPDX-License-Identifier: Apache-2.0
"""Unfinished files and folders: hidden, locked by the process that writes them, cleaned up later.

The kernel releases a lock when its process exits, in whatever way. What is not locked was left
behind, and the next run that writes into the same folder removes it.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.interruption import deferred

_MARK, _LOCK, _OLD = ".saccade-", "lock", "old"
_NAME = re.compile(r"\..+\.saccade-(lock|old|[a-z0-9_]{8})")
_TEMPORARY = re.compile(r"saccade-[a-z0-9]+-tmp-[a-z0-9_]{8}")
# The disk, a quota or a file size limit is exhausted.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Partial:
    """A hidden file or folder next to `path`, to be renamed to it; removed if it is not."""

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        self._beside, self._is_folder = path, folder
        self._handle = -1

    def __enter__(self) -> Path:
        remove_leftovers(self._beside)
        prefix = f".{self._beside.name}{_MARK}"
        try:
            with deferred():
                self.path, self._handle = _made(prefix, self._beside.parent, self._is_folder)
        except BaseException:
            self.__exit__()
            raise
        return self.path

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            with deferred():
                _remove(self.path)
                os.close(self._handle)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a folder for temporary files, and remove those of dead runs.

    Raises: SaccadeError if there is no place with space for temporary files.
    """
    handle = -1
    try:
        try:
            place = _temporary_place()
            _remove_dead(place, _TEMPORARY)
            with deferred():
                path, handle = _made(f"saccade-{purpose}-tmp-", place, True)
        except OSError as error:
            raise SaccadeError(
                f"Cannot create a temporary folder ({error}), expected one with free space. "
                "Free space there, or set TMPDIR to another folder."
            ) from error
        try:
            yield path
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise SaccadeError(
                f"{path.parent}: found no space for temporary files ({error.strerror}), expected "
                "some. Free space there, or set TMPDIR to another folder."
            ) from error
    finally:
        if handle >= 0:
            with deferred():
                _remove(path)
                os.close(handle)


@contextmanager
def only_writer(path: Path, *, wait_s: float = 0.2) -> Iterator[None]:
    """Lock `path` against other saccade processes that want to write it.

    Raises: SaccadeError if another process has the lock for longer than `wait_s`.
    """
    place = path.with_name(f".{path.name}{_MARK}{_LOCK}")
    handle = -1
    try:
        with deferred():
            handle = _claimed(path, place, time.monotonic() + wait_s)
        yield
    finally:
        if handle >= 0:
            with deferred():
                _remove(place)
                os.close(handle)


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Rename `path` to a hidden name; remove it if the block put something in its place.

    Otherwise it gets its name back. If this process dies, the next run does the same.
    """
    place = path.with_name(f".{path.name}{_MARK}{_OLD}")
    handle = _opened(path)
    if handle >= 0:
        _lock(handle)
    with deferred():
        path.rename(place)
        try:
            yield
        finally:
            _settle(place)
            if handle >= 0:
                os.close(handle)


def is_leftover(path: Path) -> bool:
    """Return True if this is the name of an unfinished file or folder."""
    return _NAME.fullmatch(path.name) is not None


def remove_leftovers(path: Path) -> bool:
    """Remove what killed runs left next to `path`; return whether any of it was for `path`."""
    removed = _remove_dead(path.parent, _NAME)
    own = re.compile(re.escape(f".{path.name}{_MARK}") + f"(?!{_LOCK}|{_OLD})")
    return any(own.match(name) for name in removed)


def _temporary_place() -> Path:
    """Return the folder of `tempfile.gettempdir`, without the test files that a kill may leave."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for place in (*filter(None, named), "/tmp", "/var/tmp", "/usr/tmp"):
        if os.access(place, os.W_OK | os.X_OK) and Path(place).is_dir():
            return Path(place).absolute()
    return Path.cwd()


def _made(prefix: str, parent: Path, folder: bool) -> tuple[Path, int]:
    while True:
        if folder:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        else:
            handle, name = tempfile.mkstemp(prefix=prefix, dir=parent)
            os.close(handle)
            path = Path(name)
        # Another run may have removed it as a leftover before it was locked.
        handle = _opened(path)
        if handle >= 0:
            _lock(handle)
            if _is_at(handle, path):
                return path, handle
            os.close(handle)


def _claimed(path: Path, place: Path, end: float) -> int:
    try:
        while True:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if _lock(handle) is not False and _is_at(handle, place):
                return handle
            os.close(handle)
            if time.monotonic() > end:
                break
            time.sleep(0.01)
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another path.") from error
    raise SaccadeError(
        f"{path}: another saccade process is writing it. Wait until it exits, or pass another path "
        "with --out."
    )


def _remove_dead(folder: Path, names: re.Pattern[str]) -> list[str]:
    """Remove unlocked leftovers and return their names."""
    removed = []
    with suppress(OSError), os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if names.fullmatch(entry.name)]
        for path in paths:
            handle = _opened(path)
            if handle < 0:
                continue
            mine = os.fstat(handle).st_uid == os.geteuid()
            if mine and _lock(handle) and _is_at(handle, path):
                _settle(path)
                removed.append(path.name)
            os.close(handle)
    return removed


def _opened(path: Path) -> int:
    try:
        return os.open(path, _OPEN)
    except OSError:
        return -1


def _lock(handle: int) -> bool | None:
    """Return True if this process has the lock now; None on a system without file locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _settle(path: Path) -> None:
    end = _MARK + _OLD
    target = path.with_name(path.name[1:].removesuffix(end))
    if path.name.endswith(end) and not os.path.lexists(target):
        with suppress(OSError):
            path.rename(target)
    else:
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
