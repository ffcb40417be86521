# SPDX-License-Identifier: Apache-2.0
"""Find libsaccade_onnxruntime in the package or the user's cache, or build it on first use."""

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

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, sha256_of, write_atomically
from saccade.plugins.native import compiler

NAME = "libsaccade_onnxruntime.so"
# The file next to a library with the hash of its sources and its own hash.
RECORD = "built.json"
PACKAGED = compiler.NATIVE / "lib"


def onnxruntime_library() -> Path:
    """Return the library with all custom ops, for `SessionOptions.register_custom_ops_library`.

    If it is neither in the package nor in the user's cache, it is built into the cache, once.

    Raises: SaccadeError if it cannot be built, or if other users can write to the cache.
    """
    compiler.require_linux()
    if _is_whole(PACKAGED):
        return PACKAGED / NAME
    folder = _private_folder(cached_folder())
    if not _is_whole(folder):
        with _locked(folder):
            # Another process may have built it while this one was waiting.
            if not _is_whole(folder):
                print(
                    "building libsaccade_onnxruntime (once, about half a minute)",
                    file=sys.stderr,
                    flush=True,
                )
                build(folder)
    return folder / NAME


def available_library() -> Path | None:
    """Return the library, built if necessary; if that fails, print why (once) and return None."""
    try:
        return onnxruntime_library()
    except SaccadeError as error:
        _say(str(error))
        return None


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def built_library() -> Path | None:
    """Return the library if it exists; never build it."""
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
    """Compile the library into `folder`, and record what it was built from.

    Raises: SaccadeError if the compiler fails or the folder cannot be written.
    """
    try:
        compiler.compile_library(folder / NAME)
    except OSError as error:
        raise SaccadeError(
            f"{folder}: the library cannot be written ({error}). "
            "Set XDG_CACHE_HOME to a folder that you own."
        ) from error
    write_record(folder)
    return folder / NAME


def write_record(folder: Path) -> None:
    """Record the hashes of the library in `folder`, without which it is ignored."""
    record = {"sources": source_hash(), "library": sha256_of(folder / NAME)}
    write_atomically(folder / RECORD, json_bytes(record))


def cached_folder() -> Path:
    """Return the cache folder for the library of these sources."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "saccade" / source_hash()[:20]


@cache
def source_hash() -> str:
    """Return one hash of everything that determines the build, except the compiler."""
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
    """Create `folder` and its parent so that only this user can write to them."""
    for place in (folder.parent, folder):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SaccadeError(
                f"{place}: the cache folder cannot be created ({error}). "
                "Set XDG_CACHE_HOME to a folder that you own."
            ) from error
        fault = _fault(place)
        if fault:
            raise SaccadeError(fault)
    return folder


def _fault(folder: Path) -> str | None:
    """Say why code in `folder` must not be loaded; None if only this user can have written it."""
    for path in (folder, folder / NAME, folder / RECORD):
        if not path.exists() and not path.is_symlink():
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            fault = "it is a link"
        elif status.st_uid != os.geteuid():
            fault = f"its owner is user {status.st_uid}, not {os.geteuid()}"
        elif status.st_mode & 0o022:
            fault = f"other users can write to it (mode {status.st_mode & 0o777:o})"
        else:
            continue
        return (
            f"{path}: {fault}, but code in it would be executed. "
            "Remove it, or set XDG_CACHE_HOME to a folder that you own."
        )
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl

    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(into: Path | None = None) -> None:
    """Print the path of the ONNX Runtime library; build it if necessary.

    Args:
        into: copy the library to this folder, such as `lib` next to this file for a wheel.
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
