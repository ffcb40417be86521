# SPDX-License-Identifier: Apache-2.0
"""Find libsaccade_onnxruntime in the package or the user's cache, or build it on first use."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, sha256_of, write_atomically
from saccade.core.leftovers import Partial
from saccade.plugins.native import library

NATIVE = Path(__file__).parent
# The C++ run-time library is not used, so that the result loads next to any version of it.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-threadsafe-statics"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
# `nodelete`: code that was registered with a runtime must stay loaded.
LINK_FLAGS = (
    *("-shared", "-static-libgcc", "-Wl,--as-needed", "-Wl,--no-undefined"),
    *("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,-z,nodelete"),
)
TARGETS = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c -mprefer-vector-width=512",
}
SHELLS = (
    "interface.cpp",
    "onnxruntime_kernel.cpp",
    "onnxruntime_library.cpp",
    "onnxruntime_ops.cpp",
)
_INSTALL = "Install one (Debian: apt install g++; Fedora: dnf install gcc-c++), or set CXX."
_WITHOUT = (
    "Models run without the library too, but slower: ONNX Runtime then uses the function bodies."
)


@dataclass(frozen=True)
class Unit:
    """One object file: its source and additional flags."""

    source: str
    object: str
    flags: tuple[str, ...] = ()


def units(machine: str) -> list[Unit]:
    """Return the object files of the library for `machine`, the slowest to compile first."""
    x86 = machine in ("x86_64", "AMD64")
    kernels = [
        Unit("kernels.cpp", f"{name}.o", (*flags.split(), f"-DSACCADE_TARGET={name}"))
        for name, flags in reversed(TARGETS.items())
        if x86 or name == "baseline"
    ]
    return kernels + [Unit(name, f"{Path(name).stem}.o") for name in SHELLS]


def sources() -> list[Path]:
    """Return all of saccade's source files in a build, sorted: units and included files."""
    files: set[Path] = set()
    left = [NATIVE / name for name in ("kernels.cpp", *SHELLS)]
    while left:
        path = left.pop().resolve()
        if path not in files:
            files.add(path)
            included = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            left += [path.parent / name for name in included]
    return sorted(files)


def find_compiler() -> list[str]:
    """Return the C++ compiler's command: $CXX, or the first of c++, g++ and clang++ on PATH.

    Raises: SaccadeError if there is none, or $CXX does not exist.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in [asked[0]] if asked else ["c++", "g++", "clang++"]:
        if shutil.which(name):
            return asked or [name]
    candidates = (
        f"CXX is {shlex.join(asked)!r}" if asked else "neither c++, g++ nor clang++ is on PATH"
    )
    raise SaccadeError(
        f"libsaccade_onnxruntime: {candidates}, expected a C++17 compiler. {_INSTALL} {_WITHOUT}"
    )


def require_linux() -> None:
    """Check that this is Linux.

    Raises: SaccadeError on any other system.
    """
    if sys.platform != "linux":
        raise SaccadeError(
            f"libsaccade_onnxruntime: this system is {sys.platform}, expected linux. {_WITHOUT}"
        )


def compile_library(into: Path, *, extra: Sequence[str] = ()) -> None:
    """Compile and link the library to the file `into`, which is created only when complete.

    Raises: SaccadeError with the command and the compiler's last lines if a step fails.
    """
    require_linux()
    compiler = find_compiler()
    into.parent.mkdir(parents=True, exist_ok=True)
    with Partial(into, folder=True) as work:

        def compile_one(unit: Unit) -> str:
            target = str(work / unit.object)
            source = str(NATIVE / unit.source)
            _run([*compiler, *FLAGS, *extra, *unit.flags, "-c", source, "-o", target])
            return target

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(compile_one, unit) for unit in units(platform.machine())]
            try:
                objects = [future.result() for future in running]
            finally:
                pool.shutdown(cancel_futures=True)
        linked = work / into.name
        _run([*compiler, *extra, *objects, *LINK_FLAGS, "-o", str(linked)])
        linked.chmod(0o755)
        linked.replace(into)


def _run(command: list[str]) -> None:
    try:
        # English messages, so that reports can be searched for.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
        said, ended = done.stdout + done.stderr, f"exited with {done.returncode}"
    except OSError as error:
        said, ended = str(error), "could not be started"
    if ended != "exited with 0":
        lines = "\n".join(said.strip().splitlines()[-20:])
        raise SaccadeError(
            f"libsaccade_onnxruntime: the compiler {ended}.\n{shlex.join(command)}\n{lines}\n"
            f"Expected a C++17 compiler (g++ 9, clang 12 or newer). {_INSTALL} {_WITHOUT}"
        )


NAME = "libsaccade_onnxruntime.so"
# The file next to a library with the hash of its sources and its own hash.
RECORD = "built.json"
PACKAGED = library.NATIVE / "lib"


def onnxruntime_library() -> Path:
    """Return the library with all custom ops, for `SessionOptions.register_custom_ops_library`.

    If it is neither in the package nor in the user's cache, it is built into the cache, once.

    Raises: SaccadeError if it cannot be built, or if other users can write to the cache.
    """
    library.require_linux()
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
        library.compile_library(folder / NAME)
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
    units = library.units(platform.machine())
    digest = hashlib.sha256(repr((platform.machine(), units)).encode())
    digest.update(repr((library.FLAGS, library.LINK_FLAGS)).encode())
    for path in library.sources():
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
