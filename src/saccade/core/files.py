# SPDX-License-Identifier: Apache-2.0
"""Atomic writes, so that a file is either complete or absent; bounded reads; hashes."""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.interruption import deferred
from saccade.core.leftovers import FULL, Partial, set_aside
from saccade.core.sizes import size_text

_FICLONE = 0x40049409  # linux/fs.h: share the blocks of a file until one of the two is written
_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def rename_into_free(source: Path, target: Path) -> None:
    """Rename `source` to `target`, which must not exist.

    Raises: FileExistsError if `target` exists.
    """
    try:
        _renameat2(source, target, _NO_REPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        # A file system without this call: between check and rename, another file may appear.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)


def exchange(one: Path, other: Path) -> None:
    """Exchange the names of two paths in one step.

    Raises: OSError if one is missing, or if the file system cannot do it (`cannot_exchange`).
    """
    _renameat2(one, other, _EXCHANGE)


def cannot_exchange(error: OSError) -> bool:
    """Return True if an error of `exchange` means that the file system does not support it."""
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
    """The path is not a regular file, or the file is larger than its limit."""


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a file or a pipe.

    Raises: OSError if it cannot be read; FileRefused if it has more than `limit` bytes. At most
        one byte more is read, whatever size the file claims.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode):
            raise FileRefused("found a device, expected a file")
        if state.st_size > limit:
            raise FileRefused(f"found {state.st_size} bytes, expected at most {limit}")
        # A read of n bytes allocates n: first as many as there are, then what a pipe still gives.
        data = file.read(state.st_size + 1)
        if len(data) != state.st_size:
            data += _rest(file, limit - len(data))
    if len(data) > limit:
        raise FileRefused(f"found more than {limit} bytes, the maximum")
    return data


def _rest(file: IO[bytes], most: int) -> bytes:
    pieces, left = [], most
    while left >= 0 and (piece := file.read(min(_PIECE_BYTES, left + 1))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file; pipes and devices, which may never end, are refused.

    Raises: OSError if it cannot be read; FileRefused for anything but a file of at most `limit`
        bytes.
    """
    check_regular(path, limit)
    return read_bounded(path, limit)


def check_regular(path: Path, limit: int) -> None:
    """Check that a path is a regular file of at most `limit` bytes.

    Raises: OSError if it is missing, FileRefused if it is something else.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        kind = "folder" if path.is_dir() else "pipe or device"
        raise FileRefused(f"found a {kind}, expected a file")
    if state.st_size > limit:
        raise FileRefused(f"found {state.st_size} bytes, expected at most {limit}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal.

    Raises: OSError if it cannot be read, FileRefused if it is a pipe or device.
    """
    check_regular(path, sys.maxsize)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, found: str, expected: str, where: str, advice: str) -> None:
    """Compare the SHA-256 of a file with the expected one; `where` says what records that.

    Raises: SaccadeError if they differ; `advice` ends its message.
    """
    if found != expected:
        raise SaccadeError(
            f"{path}: SHA-256 is {found[:12]}..., expected {expected[:12]}... as {where}. {advice}"
        )


def json_bytes(value: Any) -> bytes:
    """Return canonical JSON, with sorted keys: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_atomically(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a temporary file and rename it, so that no reader sees an incomplete file.

    Raises: SaccadeError if the folder cannot be written, or if the file exists and `replace` is
        false.
    """
    write_together({path: data}, replace=replace)


Writer = Callable[[Path], None]  # writes a file that is too large to be a `bytes` first


def write_together(files: Mapping[Path, bytes | Writer], *, replace: bool = True) -> None:
    """Write files that belong together: none appears before all are written, and the last one last.

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
    """Yield a folder to fill, which becomes `path` only if the block ends without an error.

    Raises: SaccadeError if `path` cannot be written, or if it exists, at the start or the end of
        the block, and `force` is false.
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
    """Turn system errors in the block into a message about `path`.

    With `within`, this covers only errors about files in that folder, and a full disk.
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
        raise _cannot_write(path, cause) from cause  # names the final path, not the hidden one


def is_full(error: BaseException | None) -> bool:
    """Return True if the disk is full, or a quota or a file size limit was reached."""
    return isinstance(error, OSError) and error.errno in FULL


def read_lines(path: Path, what: str = "entry") -> tuple[str, ...]:
    """Return the non-empty lines of a text file, stripped.

    Raises: SaccadeError if the file cannot be read, is not UTF-8 text, has no lines, or has more
        or longer lines than `limits` allows.
    """
    try:
        lines = read_bounded(path, limits.TEXT_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(
            f"{path}: cannot be read as text ({error}). Pass a UTF-8 file with one {what} per line."
        ) from error
    filled = tuple(line.strip() for line in lines if line.strip())
    if not filled:
        raise SaccadeError(f"{path}: found an empty file, expected one {what} per line.")
    check_labels(filled, str(path), what)
    return filled


def check_labels(labels: Sequence[str], where: str, what: str = "label") -> None:
    """Check the number and the length of labels or words.

    Raises: SaccadeError if there are more, or longer ones, than `limits` allows.
    """
    if len(labels) > limits.LABELS:
        raise SaccadeError(
            f"{where}: found {len(labels)} entries, expected at most {limits.LABELS}. "
            f"Pass a file with one {what} per output."
        )
    if (most := max(map(len, labels), default=0)) > limits.LABEL_CHARACTERS:
        raise SaccadeError(
            f"{where}: found a {what} of {most} characters, expected at most "
            f"{limits.LABEL_CHARACTERS}. Shorten it, or pass a file with one {what} per line."
        )


DOWNLOADED = "saccade_download.json"  # where a folder of a model hub came from
# Of a clone, and of folders of a model hub, from which checkpoints are converted.
_FOREIGN = (".git", "preprocessor_config.json", "open_clip_config.json", "pytorch_model.bin")


def refuse_existing(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output path that exists, before any work is done.

    Raises: SaccadeError if `path` exists and `force` is false, or if it contains an input or what
        saccade does not write.
    """
    for name in inputs:
        if name.resolve().is_relative_to(path.resolve()):
            raise SaccadeError(
                f"{path}: replacing it would remove the input {name}. Pass another path with --out."
            )
    if path.exists() and not force:
        raise _exists(path)
    foreign = next((name for name in _FOREIGN if (path / name).exists()), None)
    if foreign and not (path / DOWNLOADED).exists():
        raise SaccadeError(
            f"{path}: contains {foreign}, which saccade does not write: --force does not replace "
            "this folder. Pass another path with --out."
        )


def _cannot_write(path: Path, error: OSError) -> SaccadeError:
    if isinstance(error, FileExistsError):
        return _exists(path)  # another process was faster
    if not is_full(error):
        return SaccadeError(f"{path}: cannot be written ({error}). Choose another path.")
    return SaccadeError(
        f"{path}: cannot be written: the disk is full ({error.strerror}). Free space on it, or "
        "choose another path. What was there before is unchanged."
    )


def _exists(path: Path) -> SaccadeError:
    return SaccadeError(
        f"{path}: exists already. Pass another path with --out, or --force to replace it."
    )


@contextmanager
def _written(path: Path, data: bytes | Writer) -> Iterator[Path]:
    with ExitStack() as stack:
        with said_where(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(data):
                # In a separate folder, since a writer may have temporary files.
                partial = stack.enter_context(Partial(path, folder=True)) / path.name
                data(partial)
            else:
                partial = stack.enter_context(Partial(path))
                partial.write_bytes(data)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.chmod(0o644)
        yield partial


def _place(partial: Path, path: Path, *, force: bool) -> None:
    """Rename to `path`; with `force`, replace what is there in the same step, or else refuse."""
    if not force:
        rename_into_free(partial, path)
    elif partial.is_dir():
        _swap(partial, path)
    else:
        partial.replace(path)


def _swap(partial: Path, path: Path) -> None:
    while True:  # repeat if another process adds or removes it between two checks
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


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new one, which shares blocks with it where the file system can.

    A hard link would be as cheap, but writing to one name would change the other, and the ONNX
    checker refuses weights with several names.
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
    while size and (data := reader.read(min(_PIECE_BYTES, size))):
        writer.write(data)
        size -= len(data)
    writer.flush()


def _clone(reader: BinaryIO, writer: BinaryIO) -> bool:
    """Share the file's blocks where the file system can (Btrfs, XFS, bcachefs)."""
    try:
        import fcntl

        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    except (ImportError, OSError):
        return False  # another file system, or one that does not support it
    return True


def _require_room(writer: BinaryIO, needed: int) -> None:
    free = shutil.disk_usage(writer.fileno()).free
    if needed > free:
        text = f"the models need {size_text(needed)} more, but only {size_text(free)} are free"
        raise OSError(errno.ENOSPC, text)
