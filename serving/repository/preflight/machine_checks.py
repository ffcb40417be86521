# SPDX-License-Identifier: Apache-2.0
"""Check that the machine has what the bundled server needs, and memory for the models."""

from collections.abc import Iterator
from importlib import util

from saccade.core.errors import SaccadeError
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.model_config import RUN_BATCH
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import Repository, RepositoryModel
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.runtimes.registry import served_runtime

_MIB = 2**20


def check_machine(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the bundled server finds its libraries, a supported Python, and its packages."""
    if not target.bundled:
        if why := served_runtime(repository.deployment.runtime).only_bundled:
            yield f"{target.title} does not run its models: {why}"
            return
        raise NotChecked(f"{target.title} brings its own Python and libraries")
    try:
        check_installation(find_installation(), repository.deployment.runtime)
    except SaccadeError as error:
        yield str(error)
    if util.find_spec("PIL") is None:
        yield (
            "pillow is not installed, but the router needs it to decode images. Run: pip install "
            "pillow"
        )


def check_memory(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the weights and activations of all instances fit into memory.

    The memory that the runtime itself needs is not counted.
    """
    if not repository.models:
        raise NotChecked("no model could be opened")
    sizes = [(needed_bytes(model), model) for model in repository.models]
    on_gpu = any(
        group.kind == group.KIND_GPU for _, m in sizes for group in m.config.instance_group
    )
    if on_gpu and not target.gpus:
        raise NotChecked("its instances run on a GPU, and this machine has none")
    total = min(gpu.memory_bytes for gpu in target.gpus) if on_gpu else target.memory_bytes
    if total is None:
        raise NotChecked("the size of the memory is unknown. Pass --memory-mib")
    needed = sum(size for size, _ in sizes)
    if needed > total:
        largest, model = max(sizes, key=lambda pair: pair[0])
        yield (
            f"the models need at least {needed // _MIB} MiB ({model.name} alone needs "
            f"{largest // _MIB} MiB), but there are {total // _MIB} MiB."
        )


def needed_bytes(model: RepositoryModel) -> int:
    """Estimate a model's memory from its manifest and file size.

    It counts weights and peak activations of every instance.

    Units: bytes.
    """
    config = model.config
    said = config.parameters[RUN_BATCH].string_value if RUN_BATCH in config.parameters else ""
    batch = int(said) if said.isdecimal() and int(said) else config.max_batch_size
    instances = sum(group.count for group in config.instance_group)
    weights = model.served.weights_bytes(model)
    return int(instances * (weights + batch * model.manifest.cost.peak_activation_bytes))
