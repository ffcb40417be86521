# SPDX-License-Identifier: Apache-2.0
"""Files that are either whole or absent, and their hashes."""

import ctypes
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from saccade import limits
from saccade.errors import SaccadeError
from saccade.interruption import deferred
from saccade.leftovers import FULL, Partial, set_aside

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
    """True if that error of `exchange` says that this file system has no such step."""
    return error.errno in _UNKNOWN


def _renameat2(source: Path, target: Path, flags: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    function = call(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)
    )
    if function:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


_PIECE_BYTES = 2**20


class FileRefused(OSError):
    """Refusal of a path that is no regular file, or one larger than any that is read here."""


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file or of a pipe.

    Raises: OSError if it cannot be read, FileRefused above `limit` bytes: no more than one byte
        beyond them is read then, whatever the file says of itself.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode):
            raise FileRefused("a device is not a file")
        if state.st_size > limit:
            raise FileRefused(f"{state.st_size} bytes, at most {limit} are read")
        # A read of n bytes reserves n: as many as there are, then what a pipe goes on to give.
        data = file.read(state.st_size + 1)
        if len(data) != state.st_size:
            data += _rest(file, limit - len(data))
    if len(data) > limit:
        raise FileRefused(f"more than {limit} bytes, the most that is read")
    return data


def _rest(file: IO[bytes], most: int) -> bytes:
    pieces, left = [], most
    while left >= 0 and (piece := file.read(min(_PIECE_BYTES, left + 1))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a file that is neither a pipe nor a device, which might never end.

    Raises: OSError if it cannot be read, FileRefused for anything else and above `limit` bytes.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "folder" if path.is_dir() else "pipe or device"
        raise FileRefused(f"found a {kind}, expected a file")
    return read_bounded(path, limit)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any) -> bytes:
    """The same value gives the same bytes: sorted keys, indented, one line end."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_atomically(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file beside its place and move it there, so that no reader sees half of it.

    Raises: SaccadeError if the folder cannot be written, or something stands there and `replace`
        is false.
    """
    write_together({path: data}, replace=replace)


def write_together(files: Mapping[Path, bytes], *, replace: bool = True) -> None:
    """Write files that belong together: none appears before all are written, the last one last.

    Raises: as `write_atomically`.
    """
    with ExitStack() as stack:
        partials = {path: stack.enter_context(_written(path, data)) for path, data in files.items()}
        with deferred():
            for path, partial in partials.items():
                with said_where(path):
                    _place(partial, path, force=replace)


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `path` only when the block ends without an error.

    Raises: SaccadeError if `path` exists and `force` is false, also by the end of the block, or
        cannot be written.
    """
    refuse_existing(path, force=force)
    with ExitStack() as stack:
        with said_where(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = stack.enter_context(Partial(path, folder=True))
            partial.chmod(0o755)
        with said_where(path, within=partial):
            yield partial
        with said_where(path):
            _place(partial, path, force=force)


@contextmanager
def said_where(path: Path, *, within: Path | None = None) -> Iterator[None]:
    """The system's errors, on files `within` if that is given or for want of room, as one sentence.

    Raises: SaccadeError.
    """
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename
        inside = isinstance(place, str) and within and Path(place).is_relative_to(within)
        if not (within is None or inside or (place is None and is_full(error))):
            raise
        raise _cannot_write(path, error) from error
    except SaccadeError as error:
        cause = error.__cause__
        if within is None or not (isinstance(cause, OSError) and is_full(cause)):
            raise
        raise _cannot_write(path, cause) from cause  # whose name is not hidden


def is_full(error: BaseException | None) -> bool:
    """True if a disk, a quota or a limit of a file's size was in the way."""
    return isinstance(error, OSError) and error.errno in FULL


def read_lines(path: Path, what: str = "entry") -> tuple[str, ...]:
    """The lines of a text file without the empty ones, each stripped.

    Raises: SaccadeError if it cannot be read, is no UTF-8 text, has no line, or more or longer
        ones than `limits` allows.
    """
    try:
        lines = read_bounded(path, limits.TEXT_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(
            f"{path}: cannot be read as text ({error}). Name a UTF-8 file with one {what} a line."
        ) from error
    filled = tuple(line.strip() for line in lines if line.strip())
    if not filled:
        raise SaccadeError(f"{path}: is empty, expected one {what} a line.")
    check_labels(filled, str(path), what)
    return filled


def check_labels(labels: Sequence[str], where: str, what: str = "label") -> None:
    """Raises: SaccadeError for more or longer texts than a model has labels or words."""
    if len(labels) > limits.LABELS:
        raise SaccadeError(
            f"{where}: found {len(labels)} times a {what}, expected at most {limits.LABELS}. "
            f"Name a file with one {what} for each output."
        )
    if (most := max(map(len, labels), default=0)) > limits.LABEL_CHARACTERS:
        raise SaccadeError(
            f"{where}: found a {what} of {most} characters, expected at most "
            f"{limits.LABEL_CHARACTERS}. Shorten it, or name a file with one {what} a line."
        )


def refuse_existing(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Stop before any work is done for an output that would be in the way.

    Raises: SaccadeError if `path` exists and `force` is false, or one of the inputs lies in it.
    """
    for name in inputs:
        if name.resolve().is_relative_to(path.resolve()):
            raise SaccadeError(
                f"{path}: replacing it would remove {name}, which is read. Choose another place "
                "with --out."
            )
    if path.exists() and not force:
        raise _exists(path)


def _cannot_write(path: Path, error: OSError) -> SaccadeError:
    if isinstance(error, FileExistsError):
        return _exists(path)  # another process was faster
    if not is_full(error):
        return SaccadeError(f"{path}: cannot be written ({error}). Choose another place.")
    return SaccadeError(
        f"{path}: cannot be written ({error.strerror}), expected room for it. Make room on that "
        "disk, or choose another place; what stood there before is as it was."
    )


def _exists(path: Path) -> SaccadeError:
    return SaccadeError(
        f"{path}: exists already. Choose another place with --out, or pass --force to replace it."
    )


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    with ExitStack() as stack:
        with said_where(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = stack.enter_context(Partial(path))
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.chmod(0o644)
        yield partial


def _place(partial: Path, path: Path, *, force: bool) -> None:
    """Rename to `path`; what stands there goes in the same step, or is refused without `force`."""
    if not force:
        rename_into_free(partial, path)
    elif partial.is_dir():
        _swap(partial, path)
    else:
        partial.replace(path)


def _swap(partial: Path, path: Path) -> None:
    while True:  # for as long as others come and go between two looks
        with suppress(FileExistsError):
            return rename_into_free(partial, path)
        try:
            return exchange(partial, path)
        except FileNotFoundError:
            if not partial.exists():
                raise
        except OSError as error:
            if not cannot_exchange(error):
                raise
            with set_aside(path):
                partial.rename(path)
            return None
