# SPDX-License-Identifier: Apache-2.0
"""Places of libsaccade_onnxruntime: packaged, in the user's cache, or built there on first use."""

import hashlib
import json
import os
import platform
import shutil
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.files import json_bytes, sha256_of, write_atomically
from saccade.plugins.native import compiler

NAME = "libsaccade_onnxruntime.so"
# Beside a library: which sources it was built from, and its own hash.
RECORD = "built.json"
PACKAGED = compiler.NATIVE / "lib"


def onnxruntime_library() -> Path:
    """The library with all custom ops, for `SessionOptions.register_custom_ops_library`.

    Found beside the sources or in the user's cache, otherwise built into the cache, once.

    Raises: SaccadeError if it must be built and cannot be, or the cache is not this user's alone.
    """
    compiler.require_linux()
    if _is_whole(PACKAGED):
        return PACKAGED / NAME
    folder = _private_folder(cached_folder())
    if not _is_whole(folder):
        with _locked(folder):
            # Another process may have built it while this one waited.
            if not _is_whole(folder):
                print(
                    "building libsaccade_onnxruntime (once, about half a minute)",
                    file=sys.stderr,
                    flush=True,
                )
                build(folder)
    return folder / NAME


def available_library() -> Path | None:
    """The library where it stands or can be built; where it cannot, none, and why is said once."""
    try:
        return onnxruntime_library()
    except SaccadeError as error:
        _say(str(error))
        return None


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def built_library() -> Path | None:
    """The library if it stands already; never builds."""
    if sys.platform != "linux":
        return None
    if _is_whole(PACKAGED):
        return PACKAGED / NAME
    folder = cached_folder()
    if not folder.exists():
        return None
    fault = _fault(folder.parent) or _fault(folder)
    if fault:
        warnings.warn(fault, RuntimeWarning, stacklevel=2)
        return None
    return folder / NAME if _is_whole(folder) else None


def build(folder: Path) -> Path:
    """Compile the library into `folder`, with the record that says what it was built from.

    Raises: SaccadeError if the compiler fails or the folder cannot be written.
    """
    try:
        compiler.compile_library(folder / NAME)
    except OSError as error:
        raise SaccadeError(
            f"{folder}: the library cannot be written there ({error}). "
            "Set XDG_CACHE_HOME to a folder of yours."
        ) from error
    write_record(folder)
    return folder / NAME


def write_record(folder: Path) -> None:
    """Say what the library in `folder` is, so that it is found."""
    record = {"sources": source_hash(), "library": sha256_of(folder / NAME)}
    write_atomically(folder / RECORD, json_bytes(record))


def cached_folder() -> Path:
    """Folder of the cache that has, or would have, the library of these sources."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "saccade" / source_hash()[:20]


@cache
def source_hash() -> str:
    """One hash of all that decides what is built, apart from the compiler."""
    units = compiler.units(platform.machine())
    digest = hashlib.sha256(repr((platform.machine(), units)).encode())
    digest.update(repr((compiler.FLAGS, compiler.LINK_FLAGS)).encode())
    for path in compiler.sources():
        digest.update(f"{path.parent.name}/{path.name}\n{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        return record == {"sources": source_hash(), "library": sha256_of(folder / NAME)}
    except (OSError, ValueError):
        return False


def _private_folder(folder: Path) -> Path:
    """`folder` and the one above it, made for this user alone."""
    for place in (folder.parent, folder):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SaccadeError(
                f"{place}: the cache cannot be made ({error}). "
                "Set XDG_CACHE_HOME to a folder of yours."
            ) from error
        fault = _fault(place)
        if fault:
            raise SaccadeError(fault)
    return folder


def _fault(folder: Path) -> str | None:
    """Why code in `folder` must not be loaded; None where only this user can have put it there."""
    for path in (folder, folder / NAME, folder / RECORD):
        if not path.exists() and not path.is_symlink():
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            fault = "it is a link"
        elif status.st_uid != os.geteuid():
            fault = f"its owner is user {status.st_uid}, not {os.geteuid()}"
        elif status.st_mode & 0o022:
            fault = f"others may write to it (mode {status.st_mode & 0o777:o})"
        else:
            continue
        return (
            f"{path}: {fault}, and code from there would be executed. "
            "Remove it, or set XDG_CACHE_HOME to a folder of yours."
        )
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl

    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(into: Path | None = None) -> None:
    """Print where the ONNX Runtime library is, building it if need be.

    Args:
        into: put a copy into this folder, such as `lib` beside this file before a wheel is made.
    """
    if into is None:
        print(onnxruntime_library())
        return
    into.mkdir(parents=True, exist_ok=True)
    if not _is_whole(into):
        partial = into / f".{NAME}"
        shutil.copyfile(onnxruntime_library(), partial)
        partial.chmod(0o755)
        partial.replace(into / NAME)
        write_record(into)
    print(into / NAME)


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except SaccadeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
