# SPDX-License-Identifier: Apache-2.0
"""The machine: what the bundled server needs of it, and whether the models fit its memory."""

from collections.abc import Iterator
from importlib import util

from saccade.errors import SaccadeError
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.model_config import RUN_BATCH
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import Repository, RepositoryModel
from saccade.serving.repository.preflight.target import Target

_MIB = 2**20


def check_machine(repository: Repository, target: Target) -> Iterator[str]:
    """The bundled server finds its libraries, a Python that it knows, and packages that fit."""
    if not target.bundled:
        raise NotChecked(f"{target.title} brings its own Python and libraries")
    try:
        check_installation(find_installation())
    except SaccadeError as error:
        yield str(error)
    if util.find_spec("PIL") is None:
        yield "pillow is not installed, with which the router decodes images."


def check_memory(repository: Repository, target: Target) -> Iterator[str]:
    """Weights and activations of all instances fit; what the runtime itself needs comes on top."""
    if not repository.models:
        raise NotChecked("no model could be opened")
    sizes = [(needed_bytes(model), model) for model in repository.models]
    on_gpu = any(
        group.kind == group.KIND_GPU for _, m in sizes for group in m.config.instance_group
    )
    if on_gpu and not target.gpus:
        raise NotChecked("its instances run on a GPU, and there is none at hand")
    total = min(gpu.memory_bytes for gpu in target.gpus) if on_gpu else target.memory_bytes
    if total is None:
        raise NotChecked("nothing says how much memory there is: pass --memory-mib")
    needed = sum(size for size, _ in sizes)
    if needed > total:
        largest, model = max(sizes, key=lambda pair: pair[0])
        yield (
            f"the models need at least {needed // _MIB} MiB ({model.name} alone "
            f"{largest // _MIB}), there are {total // _MIB}."
        )


def needed_bytes(model: RepositoryModel) -> int:
    """Weights and peak activations of every instance, from the manifest and the file's size."""
    config = model.config
    said = config.parameters[RUN_BATCH].string_value if RUN_BATCH in config.parameters else ""
    batch = int(said) if said.isdecimal() and int(said) else config.max_batch_size
    instances = sum(group.count for group in config.instance_group)
    weights = model.served.weights_bytes(model)
    return int(instances * (weights + batch * model.manifest.cost.peak_activation_bytes))
