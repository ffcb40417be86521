# SPDX-License-Identifier: Apache-2.0
"""The server's command line, for running it without `saccade serve`.

The arguments are those of `saccade serve`. The container's arguments differ in paths and in what a
repository for GPUs needs. There is no supervision: the server does not notice a dead variant.
"""

import csv
import hashlib
import io
import os
import secrets
import shlex
import stat
from dataclasses import replace
from pathlib import Path, PurePosixPath

from saccade.core.errors import SaccadeError
from saccade.core.files import new_folder
from saccade.core.machine import cores
from saccade.core.options import flag
from saccade.plugins.native.library import NAME as ONNXRUNTIME_LIBRARY
from saccade.serving.client.connection import is_loopback
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.installation import (
    Installation,
    check_installation,
    find_installation,
)
from saccade.serving.repository.requirements import (
    LIBRARIES,
    RELEASE,
    Requirements,
    refuse_container,
    refuse_unrunnable,
    requirements_of,
)
from saccade.serving.server.addresses import (
    ServeOptions,
    listening,
    numeric,
    refuse_shared,
)
from saccade.serving.server.process import (
    EXIT_TIMEOUT_S,
    backend_code,
    backend_folder,
    limited,
    server_arguments,
    trace_arguments,
    writable,
)
from saccade.serving.server.run_folder import link_models
from saccade.serving.server.server import refuse_exposure

IMAGE = f"saccade-server:{RELEASE}"  # built from docker/Dockerfile
MODELS = PurePosixPath("/models")
# The ports that the server in the container listens on.
INSIDE = ServeOptions(host="0.0.0.0", accept_risk=True, http=True)
SHARED_MEMORY_MIB = 256
PIDS = 4096  # includes threads: each model's process has some, plus those of NumPy
STOP_TIMEOUT_S = EXIT_TIMEOUT_S + 10  # more than the server needs to finish requests in flight
_PORTS = ("grpc_port", "http_port", "metrics_port")  # the fourth belongs to the supervisor
_BACKENDS = PurePosixPath("/opt/tritonserver/backends")
_USER = "1000:1000"  # the user triton-server of the image


def print_command(
    repository: Path | str, options: ServeOptions | None = None, *, container: bool = False
) -> tuple[str, ...]:
    """Return the command that serves a repository, on this machine or in NVIDIA's container.

    Raises: SaccadeError for wrong input, port 0, the same port twice, a host beyond loopback
        without `accept_risk`, or a repository that only the other server can run; MissingPackage
        if there is no server here.
    """
    repository, options = Path(repository), options or ServeOptions()
    if options.log_format != "text":
        raise SaccadeError(
            f"--log-format {options.log_format}: the supervisor writes this log, but a printed "
            "command runs without it. Drop the option."
        )
    # HTTP is on in the container, because Docker's health check uses it.
    _check_ports(options, _PORTS if container else listening(options))
    options = replace(options, host=numeric(options.host))
    runtime = read_repository(repository).runtime
    requirements = requirements_of(repository)
    if container:
        return _container(repository.resolve(), options, requirements)
    return _embedded(repository, options, requirements, runtime)


def as_text(words: tuple[str, ...]) -> str:
    """Return the command for a shell, one option per line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def container_arguments(requirements: Requirements) -> list[str]:
    """Return the arguments of the server in the container, which are defined only here."""
    arguments = server_arguments(INSIDE, Path(_BACKENDS), Path(MODELS), "saccade-")
    return arguments + requirements.arguments


def _container(
    repository: Path, options: ServeOptions, requirements: Requirements
) -> tuple[str, ...]:
    if not is_loopback(options.host) and not options.accept_risk:
        raise SaccadeError(
            f"--host {options.host}: other machines could reach the container there. It requires "
            "no password, has no TLS and accepts gRPC messages of any size. Put a proxy in front "
            "of it (docs/production.md), or pass --accept-risk to do it anyway."
        )
    refuse_container(repository, requirements)
    for name in requirements.op_libraries:
        if "/" in name and PurePosixPath(name).parent != LIBRARIES:
            raise SaccadeError(
                f"{repository}: its models load {name}, which is on this machine but not in the "
                f"container. Expected {ONNXRUNTIME_LIBRARY}, or that in {LIBRARIES}. Write the "
                "repository again, if necessary with --no-op-library to use function bodies."
            )
    publish = [
        f"--publish={options.host}:{getattr(options, port)}:{getattr(INSIDE, port)}"
        for port in _PORTS
    ]
    return (
        # Never pull: the image is built here, and we do not own its name on a registry.
        *("docker", "run", "--rm", "--pull=never"),
        *(f"--user={_USER}", "--read-only", "--tmpfs=/tmp", f"--pids-limit={PIDS}"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--shm-size={SHARED_MEMORY_MIB}m", f"--stop-timeout={STOP_TIMEOUT_S}"),
        *(["--gpus=all"] if requirements.gpu else []),
        *(f"--mount={_mount(repository, MODELS)}", *publish, IMAGE, "tritonserver"),
        *container_arguments(requirements),
    )


def _mount(source: Path, target: PurePosixPath) -> str:
    # Docker reads the value as a line of CSV, so a comma in a path needs quotes.
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", "readonly"]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _embedded(
    repository: Path, options: ServeOptions, requirements: Requirements, runtime: str
) -> tuple[str, ...]:
    installation = find_installation()
    refuse_unrunnable(repository, requirements, installation)
    refuse_exposure(options, installation)
    check_installation(installation, runtime)
    folder = _prepared(installation, repository)
    backends = installation.backends if installation.has_onnxruntime else folder / "backends"
    regions = f"saccade-printed-{secrets.token_hex(3)}-"
    changed = [
        f"{name}={value}"
        for name, value in installation.environment().items()
        if name == "ORT_DISABLE_TELEMETRY" or value != os.environ.get(name)
    ]
    arguments = server_arguments(options, backends, folder / "models", regions)
    arguments += trace_arguments(folder / "models", options, os.environ)
    return ("env", *changed, *limited(installation.binary), *arguments, *requirements.arguments)


def _prepared(installation: Installation, repository: Path) -> Path:
    """Return a folder with the backends and a copy of the models, made once per repository.

    The server writes caches next to the models that it runs; they must not mix with hashed files.
    """
    digest = hashlib.sha256(repr((installation, repository.resolve(), cores())).encode())
    digest.update((repository / "saccade.json").read_bytes())
    for source in backend_code().values():
        digest.update(source)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    folder = home / "saccade" / f"served-{digest.hexdigest()[:16]}"
    with writable(folder, "XDG_CACHE_HOME"):
        home.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        if not folder.exists():
            # Another process that does this at the same time writes the same files.
            with new_folder(folder, force=True) as partial:
                backend_folder(installation, partial / "backends")
                link_models(repository, partial / "copy", partial / "models")
    _refuse_foreign(folder.parent)
    _refuse_foreign(folder)
    return folder


def _refuse_foreign(folder: Path) -> None:
    state = folder.lstat()
    is_ours = state.st_uid == os.geteuid() and not state.st_mode & 0o022
    if not is_ours or stat.S_ISLNK(state.st_mode):
        raise SaccadeError(
            f"{folder}: other users can write to it, but code in it would be executed. "
            "Remove it, or set XDG_CACHE_HOME to a folder of your own."
        )


def _check_ports(options: ServeOptions, names: tuple[str, ...]) -> None:
    chosen: dict[str, int] = {}
    for name in names:
        if name not in _PORTS:
            continue
        port = getattr(options, name)
        if port == 0:
            raise SaccadeError(
                f"{flag(name)} 0: a free port can only be found when the server starts, but a "
                "printed command starts later. Pass a port."
            )
        refuse_shared(name, port, chosen)
        chosen[name] = port
