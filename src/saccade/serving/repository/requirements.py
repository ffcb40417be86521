# SPDX-License-Identifier: Apache-2.0
"""Requirements of a repository's models on a server beyond those of every repository."""

import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.gpu import gpus
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.repository.config_text import read_config
from saccade.serving.repository.installation import Installation
from saccade.serving.repository.model_config import data_type
from saccade.serving.repository.runtimes.registry import served_names, served_runtime

MENDED_LINE = "25.08"  # of the server: the classes of strings are refused (server#8267)
RELEASE = "26.07"  # of NVIDIA's container, as docker/Dockerfile pins it
LIBRARIES = PurePosixPath("/opt/saccade/lib")  # inside that container


@dataclass(frozen=True)
class Requirements:
    """Read from the models' configs."""

    gpu: bool = False
    runtimes: tuple[str, ...] = ()  # those that need a GPU, or an argument of their own
    rate_limit: bool = False
    op_libraries: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()  # outputs that are texts, as routers of older releases have them

    @property
    def arguments(self) -> list[str]:
        """Arguments of the server for these models."""
        arguments = [
            word for name in self.runtimes for word in served_runtime(name).server_arguments
        ]
        if self.rate_limit:
            # Without it the server ignores the groups that models sharing a GPU name.
            arguments.append("--rate-limit=execution_count")
        return arguments


def requirements_of(repository: Path) -> Requirements:
    """The needs of all models of a repository together.

    Raises: SaccadeError for a configuration that is none.
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
        strings=tuple(sorted({name for config in configs for name in strings_in(config)})),
    )


def _demanding() -> list[str]:
    return [
        name
        for name in served_names()
        if runtime_named(name).gpu_only or served_runtime(name).server_arguments
    ]


def _runs(name: str, config: Any) -> bool:
    """True if a model with this configuration is run by that runtime."""
    served = served_runtime(name)
    named_platform = bool(served.platform) and config.platform == served.platform
    return named_platform or bool(config.backend == served.backend)


def strings_in(config: Any) -> list[str]:
    """The outputs of a model that are strings."""
    return [tensor.name for tensor in config.output if tensor.data_type == data_type("string")]


def refuse_unrunnable(repository: Path, requirements: Requirements, server: Installation) -> None:
    """Refuse models that a server of this machine cannot run, before it is started.

    Raises: SaccadeError for plans or GPU instances, where the server or the machine has none.
    """
    if not requirements.gpu or (not server.bundled and gpus()):
        return
    on_gpu = [served_runtime(name).models_title for name in requirements.runtimes]
    reason = on_gpu[0] if on_gpu else "models whose instances are KIND_GPU"
    lacks = (
        "the bundled server runs ONNX files on KIND_CPU only"
        if server.bundled
        else f"{server.binary} needs a GPU for them, and its driver shows none"
    )
    folder = shlex.quote(str(repository))
    raise SaccadeError(
        f"{repository}: has {reason}, but {lacks}. Check it with `saccade preflight {folder} "
        f"--server-version {RELEASE}` and take the container's command from `saccade serve "
        f"{folder} --print-command --container`; or write the repository again with --runtime "
        f"{DEFAULT} --instances cpu."
    )


def _config(path: Path) -> Any:
    try:
        return read_config(path)
    except SaccadeError as error:
        raise SaccadeError(
            f"{path.parent}: {error} Find all that is wrong with: saccade preflight "
            f"{shlex.quote(str(path.parents[1]))}"
        ) from error
