# SPDX-License-Identifier: Apache-2.0
"""Files that are either whole or absent, and their hashes."""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from saccade.plugins import limits
from saccade.plugins.errors import SaccadeError

_PIECE_BYTES = 2**20


class FileRefused(OSError):
    """What is there is no file, or one that is larger than any that is read here."""


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file or of a pipe.

    Raises: OSError if it cannot be read, FileRefused above `limit` bytes: no more than one byte
        beyond them is read then, whatever the file says of itself.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_ISCHR(state.st_mode) or stat.S_ISBLK(state.st_mode):
            raise FileRefused("a device is no file")
        if state.st_size > limit:
            raise FileRefused(f"{state.st_size} bytes, at most {limit} are read")
        # A read of n bytes reserves n: as many as there are, then what a pipe goes on to give.
        data = file.read(state.st_size + 1)
        if len(data) != state.st_size:
            data += _rest(file, limit - len(data))
    if len(data) > limit:
        raise FileRefused(f"more than {limit} bytes, which are the most that is read")
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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader sees half of it.

    Raises: SaccadeError if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another place.") from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another place.") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `path` only when the block ends without an error.

    Raises: SaccadeError if `path` exists and `force` is false, also by the end of the block, or
        cannot be written.
    """
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise SaccadeError(f"{path}: cannot be written ({error}). Choose another place.") from error
    partial.chmod(0o755)
    try:
        yield partial
        refuse_existing(path, force=force)  # another process may have been faster
        _swap(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise SaccadeError(f"{path}: is empty, expected one {what} a line.")
    check_labels(found, str(path), what)
    return found


def check_labels(found: Sequence[str], where: str, what: str = "label") -> None:
    """Raises: SaccadeError for more or longer texts than a model has labels or words."""
    if len(found) > limits.LABELS:
        raise SaccadeError(
            f"{where}: found {len(found)} times a {what}, expected at most {limits.LABELS}. "
            f"Name a file with one {what} for each output."
        )
    if (most := max(map(len, found), default=0)) > limits.LABEL_CHARACTERS:
        raise SaccadeError(
            f"{where}: found a {what} of {most} characters, expected at most "
            f"{limits.LABEL_CHARACTERS}. Shorten it, or name a file with one {what} a line."
        )


def refuse_existing(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Stop before any work is done for an output that would be in the way.

    Raises: SaccadeError if `path` exists and `force` is false, or one of the inputs lies in it.
    """
    for each in inputs:
        if each.resolve().is_relative_to(path.resolve()):
            raise SaccadeError(
                f"{path}: replacing it would remove {each}, which is read. Choose another place "
                "with --out."
            )
    if path.exists() and not force:
        raise SaccadeError(
            f"{path}: exists already. "
            "Choose another place with --out, or pass --force to replace it."
        )


def _swap(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent)) / path.name
    path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        old.rename(path)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)
