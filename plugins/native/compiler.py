# SPDX-License-Identifier: Apache-2.0
"""Compile libsaccade_onnxruntime: kernels once per instruction set, and the interface code."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.leftovers import Partial

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
