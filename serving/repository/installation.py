# SPDX-License-Identifier: Apache-2.0
"""Find the server on this machine, and check that it can run, with the models of a repository."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.core.errors import MissingPackage, SaccadeError, install
from saccade.exporter.runtimes.gpu import gpus
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.model_repository.router.routes import groups_in_flight
from saccade.serving.client.router_view import DESCRIBED
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.runtimes.registry import served_names, served_runtime

STUB = "triton_python_backend_stub"
OLDEST_GLIBC = (2, 35)
BUNDLED_LINE = "24.10"
RELEASE = "26.07"  # NVIDIA's container that docker/Dockerfile pins
LIBRARIES = PurePosixPath("/opt/saccade/lib")  # folder inside that container
ANSWERING_THREADS = 4  # of the server, for each Python model, besides those for its calls
_ELSEWHERE = (
    "The server runs on Linux with glibc 2.35 or newer (Ubuntu 22.04, Debian 12). "
    "Here you can still export, verify, and call a server that runs elsewhere (--url)."
)


@dataclass(frozen=True)
class Installation:
    """A server on this machine: its program, backends and libraries."""

    binary: Path
    backends: Path
    stub: Path
    libraries: tuple[Path, ...]
    bundled: bool

    @property
    def has_onnxruntime(self) -> bool:
        """True if the server has a compiled backend for ONNX files."""
        return (self.backends / "onnxruntime" / "libtriton_onnxruntime.so").exists()

    def environment(self) -> dict[str, str]:
        """Return the environment variables to start the server with."""
        # The first python3 on PATH determines which packages the Python models see.
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        libraries = [*map(str, self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        # With a cache of bytecode the server could run old bytecode of a changed model.
        given = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
        return {
            **given,
            "PATH": os.pathsep.join(paths) if self.bundled else paths[1],
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        }


def find_installation() -> Installation:
    """Return the server of the pip package, or else the one on PATH.

    Raises: SaccadeError on another system, MissingPackage if there is no server.
    """
    check_system()
    package = util.find_spec("pytriton")
    if package and package.origin:
        root = Path(package.origin).parent / "tritonserver"
        if (root / "bin" / "tritonserver").exists():
            return _bundled(root)
    program = shutil.which("tritonserver")
    if not program:
        raise MissingPackage(
            "There is no tritonserver: the package nvidia-pytriton is not installed, and no "
            f"program of that name is on PATH. Install it with: {install('serve')}"
        )
    root = Path(program).resolve().parents[1]
    stub = root / "backends" / "python" / STUB
    if not stub.exists():
        raise SaccadeError(
            f"{program}: this server has no Python backend (expected {stub}), which the router "
            f"needs. Install the bundled server with: {install('serve')}"
        )
    return Installation(Path(program), root / "backends", stub, (root / "lib",), bundled=False)


def check_system() -> None:
    """Refuse an operating system on which the server cannot run.

    Raises: SaccadeError that names the system.
    """
    if sys.platform != "linux":
        raise SaccadeError(f"This system is {platform.system()}. {_ELSEWHERE}")
    glibc = glibc_version()
    if glibc is None or glibc < OLDEST_GLIBC:
        found = "has no glibc" if glibc is None else f"has glibc {'.'.join(map(str, glibc))}"
        raise SaccadeError(f"This system {found}. {_ELSEWHERE}")


def glibc_version() -> tuple[int, ...] | None:
    """Return the version of glibc, or None if the C library is a different one."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return None
    numbers = re.search(r"glibc (\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_installation(installation: Installation, runtime: str = DEFAULT) -> None:
    """Check for everything that would make the server hang or give wrong answers later.

    `runtime` is the name of the runtime that runs the variants.

    Raises: SaccadeError if a shared library is missing, MissingPackage if NumPy has the wrong
        version or the runtime is not installed.
    """
    for program in (installation.binary, installation.stub):
        missing = missing_libraries(program, installation.environment())
        if missing:
            raise SaccadeError(_missing_text(program, missing))
    if not installation.bundled:
        return
    if not (Path(sys.executable).parent / "python3").exists():
        raise SaccadeError(
            f"{sys.executable}: there is no python3 next to it, which the server needs to find "
            "packages. Run saccade from a virtual environment (python3 -m venv)."
        )
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise MissingPackage(
            f"numpy {numpy} is installed, expected numpy 1.26: with numpy 2 the bundled server "
            f"returns empty outputs. Install it with: {install('serve')}"
        )
    runs = runtime_named(runtime)
    if runs.packages and not runs.is_here():
        raise MissingPackage(
            f"{runtime} is not installed, but the variants run on it. "
            f"Install it with: {runs.packages.advice}"
        )


def missing_libraries(program: Path, environment: dict[str, str]) -> list[str]:
    """Return the shared libraries that the loader would not find, without running `program`."""
    traced = subprocess.run(
        [program],
        env={**environment, "LD_TRACE_LOADED_OBJECTS": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return re.findall(r"^\s*(\S+) => not found", traced.stdout, flags=re.MULTILINE)


def _missing_text(program: Path, missing: list[str]) -> str:
    python = next((name for name in missing if name.startswith("libpython")), None)
    if python:
        version = python.removeprefix("libpython").partition(".so")[0]
        return (
            f"{python} was not found. The server loads this Python as a shared library and hangs "
            f"without it. Install it (Debian, Ubuntu: apt-get install libpython{version}), or use "
            "a Python built with --enable-shared."
        )
    return (
        f"{program.name} needs shared libraries that were not found: {', '.join(missing)}. "
        "Install them, or reinstall the server with: pip install --force-reinstall nvidia-pytriton"
    )


def _bundled(root: Path) -> Installation:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = root / "python_backend_stubs"
    stub = stubs / version / STUB
    if not stub.exists():
        known = ", ".join(sorted((path.name for path in stubs.glob("3.*")), key=as_numbers))
        raise SaccadeError(
            f"This is Python {version}, but the bundled server supports Python {known}. Create a "
            "virtual environment with one that saccade also supports (3.11 to 3.13)."
        )
    libraries = (
        root.parents[1] / "nvidia_pytriton.libs",
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
        Path(sys.base_prefix) / "lib",
    )
    return Installation(
        root / "bin" / "tritonserver", root / "backends", stub, libraries, bundled=True
    )


def as_numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version such as 24.10, to compare it with another."""
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Requirements:
    """Needs of the models, read from their configurations."""

    gpu: bool = False
    # runtimes that need a GPU, an extra argument of the server, or the bundled server
    runtimes: tuple[str, ...] = ()
    rate_limit: bool = False
    op_libraries: tuple[str, ...] = ()
    calls: int | None = None  # that the router may make at the same time, if it is known

    @property
    def arguments(self) -> list[str]:
        """Arguments that the server needs for these models."""
        arguments = [
            word for name in self.runtimes for word in served_runtime(name).server_arguments
        ]
        if self.calls is not None:
            # A call occupies a thread. By default there are 32, which limit the calls, and which
            # are woken in turn: with a few, the server takes a tenth less CPU time per request.
            threads = self.calls + ANSWERING_THREADS
            arguments.append(f"--backend-config=python,thread-pool-size={threads}")
        if self.rate_limit:
            # Without it the server ignores the resource that models on one GPU share.
            arguments.append("--rate-limit=execution_count")
        return arguments


def requirements_of(repository: Path) -> Requirements:
    """Return the combined needs of all models of a repository.

    Raises: SaccadeError if a configuration cannot be read.
    """
    configs = [_config(path) for path in sorted(repository.glob("*/config.pbtxt"))]
    groups = [group for config in configs for group in config.instance_group]
    needy = tuple(name for name in _demanding() if any(_runs(name, config) for config in configs))
    libraries = {name for config in configs for name in config.model_operations.op_library_filename}
    return Requirements(
        gpu=any(runtime_named(name).gpu_only for name in needy)
        or any(group.kind == group.KIND_GPU for group in groups),
        runtimes=needy,
        rate_limit=any(group.HasField("rate_limiter") for group in groups),
        op_libraries=tuple(sorted(libraries)),
        calls=_calls(configs),
    )


def _calls(configs: list[Any]) -> int | None:
    """Return the most calls that a router makes at the same time; the server has threads for each.

    Its own probe is one of them.
    """
    counts = [
        (config, max(1, group.count)) for config in configs for group in config.instance_group
    ]
    routers = max((count for config, count in counts if DESCRIBED in config.parameters), default=1)
    return sum(groups_in_flight(count, routers) for _, count in counts) or None


def _demanding() -> list[str]:
    return [
        name
        for name in served_names()
        if runtime_named(name).gpu_only
        or served_runtime(name).server_arguments
        or served_runtime(name).only_bundled
    ]


def _runs(name: str, config: Any) -> bool:
    """Return whether the runtime `name` runs a model with this configuration."""
    served = served_runtime(name)
    named_platform = bool(served.platform) and config.platform == served.platform
    return named_platform or bool(config.backend == served.backend)


def refuse_unrunnable(repository: Path, requirements: Requirements, server: Installation) -> None:
    """Refuse models that the server of this machine cannot run, before it is started.

    Raises: SaccadeError if models need a GPU that the server or the machine does not have.
    """
    if not server.bundled:
        refuse_container(repository, requirements)
    if not requirements.gpu or (not server.bundled and gpus()):
        return
    on_gpu = [served_runtime(name).models_title for name in requirements.runtimes]
    reason = on_gpu[0] if on_gpu else "models whose instances are KIND_GPU"
    lacks = (
        "the bundled server runs ONNX files on KIND_CPU only"
        if server.bundled
        else f"{server.binary} needs a GPU for them, and the driver reports none"
    )
    folder = shlex.quote(str(repository))
    raise SaccadeError(
        f"{repository}: has {reason}, but {lacks}. To serve it with a container, check it with "
        f"`saccade preflight {folder} --server-version {RELEASE}` and get the command from "
        f"`saccade serve {folder} --print-command --container`. To serve it here, write it again "
        f"with --runtime {DEFAULT} --instances cpu."
    )


def refuse_container(repository: Path, requirements: Requirements) -> None:
    """Refuse models that only the bundled server runs, before another server loads them.

    Raises: SaccadeError that says why, and how to write them for any server.
    """
    for name in requirements.runtimes:
        if why := served_runtime(name).only_bundled:
            raise SaccadeError(
                f"{repository}: has {served_runtime(name).models_title}, which need the bundled "
                f"server: {why} Write the repository again with --runtime {DEFAULT}, or serve it "
                f"with the bundled server ({install('serve')})."
            )


def _config(path: Path) -> Any:
    try:
        return read_config(path)
    except SaccadeError as error:
        raise SaccadeError(
            f"{path.parent}: {error} To list every fault, run: saccade preflight "
            f"{shlex.quote(str(path.parents[1]))}"
        ) from error
