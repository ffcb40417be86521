# SPDX-License-Identifier: Apache-2.0
"""What the models of a repository need from a server beyond the needs of every repository."""

import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.core.errors import SaccadeError, install
from saccade.exporter.runtimes.gpu import gpus
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.repository.installation import Installation
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.runtimes.registry import served_names, served_runtime

RELEASE = "26.07"  # NVIDIA's container that docker/Dockerfile pins
LIBRARIES = PurePosixPath("/opt/saccade/lib")  # folder inside that container


@dataclass(frozen=True)
class Requirements:
    """Needs of the models, read from their configurations."""

    gpu: bool = False
    # runtimes that need a GPU, an extra argument of the server, or the bundled server
    runtimes: tuple[str, ...] = ()
    rate_limit: bool = False
    op_libraries: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Arguments that the server needs for these models."""
        arguments = [
            word for name in self.runtimes for word in served_runtime(name).server_arguments
        ]
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
    )


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
