# SPDX-License-Identifier: Apache-2.0
"""TensorRT in a server: plans, one per kind of GPU, each with a manifest."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import Gpu, gpu_at_hand
from saccade.exporter.runtimes.runners import Runner
from saccade.plugins.contract import Ops
from saccade.serving.repository.model_config import MAX_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.report import NotChecked, Target
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.requirements import LIBRARIES
from saccade.serving.repository.runtimes.plans import (
    EnginePlan,
    check_batches,
    check_capabilities,
    check_engines,
    check_plugins,
    check_profiles,
    engine_file,
    plan_files,
    read_plans,
)
from saccade.serving.repository.runtimes.served_runtime import (
    ONNXRUNTIMES_OWN,
    ModelCheck,
    ServedFiles,
    ServedRuntime,
    StoredFile,
    refuse_options,
)

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest


def check_answer(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Report that preflight cannot run plans."""
    raise NotChecked("a plan runs only on its own kind of GPU, with the server's TensorRT")
    yield


class ServedTensorRT(ServedRuntime):
    """The server's backend for plans."""

    backend = "tensorrt"
    platform = "tensorrt_plan"
    bundled = False
    models_title = "TensorRT plans"
    server_arguments = (
        f"--backend-config=tensorrt,plugins={LIBRARIES / 'libsaccade_tensorrt.so'}",
    )
    checks: Mapping[str, ModelCheck] = {
        "engines": check_engines,
        "profiles": check_profiles,
        "capabilities": check_capabilities,
        "plugins": check_plugins,
        "answer": check_answer,
    }
    rules = ("engines", "profiles")

    def check_options(self, options: RepositoryOptions) -> None:
        if not options.engines:
            raise SaccadeError(
                f"--runtime {options.runtime} needs --engines DIR[,DIR...]. Name the folders that "
                "`saccade build ARTEFACT --engine tensorrt` wrote, one per kind of GPU."
            )
        if options.instances == "cpu":
            raise SaccadeError("--instances is cpu, but plans run on GPUs only. Leave it out.")
        if not options.op_library:
            raise SaccadeError(
                "--no-op-library is for ONNX Runtime only. Plans use the plugins of the server's "
                "option --backend-config=tensorrt,plugins=; see `saccade serve --print-command`."
            )
        refuse_options(options, "onnxruntime", "threads", *ONNXRUNTIMES_OWN)

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> dict[str, ServedFiles]:
        plans = read_plans(options.engines, folder.manifests)
        check_batches(plans, max_images)
        parts = {manifest.variant.name: manifest for manifest in folder.manifests}
        return {name: _served_files(parts[name], own) for name, own in plans.items()}

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> dict[str, Any]:
        # The default plan was the first of --engines.
        default = model.config.default_model_filename
        plans = sorted(_plans_of(model).items(), key=lambda plan: plan[1] != default)
        return config_fields(dict(plans), run_batch)

    def files(self, model: RepositoryModel) -> set[str]:
        plans = _plans_of(model)
        return {f"1/{name}" for name in plans.values()} | set(map(engine_file, plans))

    def weights_bytes(self, model: RepositoryModel) -> int:
        # A server loads one plan, that of its GPU.
        return max((engine.file.bytes for engine in model.engines.values()), default=0)

    def check_gpus(self, model: RepositoryModel, gpus: Sequence[Gpu]) -> None:
        from saccade.exporter.runtimes.tensorrt.loading import check_fits

        for gpu in gpus:
            check_fits(*_plan_for(model, gpu), gpu)

    def runner(self, model: RepositoryModel) -> Runner:
        from saccade.exporter.runtimes.tensorrt.loading import engine_runner

        return engine_runner(*_plan_for(model, gpu_at_hand()))


def _plans_of(model: RepositoryModel) -> dict[str, str]:
    return plan_files(tuple(model.engines))


def _plan_for(model: RepositoryModel, gpu: Gpu | None) -> tuple[Path, "EngineManifest"]:
    """Return the plan for a GPU; without a GPU any plan, whose loader then names its GPU."""
    plans = _plans_of(model)
    if gpu is None:
        capability = next(iter(plans))
    elif (capability := gpu.capability) not in plans:
        raise SaccadeError(
            f"{model.name}: has plans for compute capability {', '.join(plans)}, but {gpu.name} "
            f"has {capability}. Run `saccade build ARTEFACT --engine {ServedTensorRT.backend}` on "
            "such a GPU, and add the folder that it writes to --engines."
        )
    return model.version / plans[capability], model.engines[capability]


def _served_files(manifest: Manifest, plans: Sequence[EnginePlan]) -> ServedFiles:
    named = plan_files([plan.capability for plan in plans])
    files = {}
    for plan in plans:
        source = StoredFile(plan.folder / plan.engine.file.name, plan.engine.file.sha256)
        files[f"1/{named[plan.capability]}"] = source
        files[engine_file(plan.capability)] = StoredFile(json_bytes(plan.engine.to_dict()))
    by_plugins = all(plan.engine.plugins for plan in plans)
    ops: Ops = "kernels" if by_plugins else "bodies"
    return ServedFiles(
        files,
        lambda run_batch, _: config_fields(named, run_batch),
        ops if manifest.custom_ops else None,
        max_batch=min(MAX_BATCH, *(plan.max_batch for plan in plans)),
        usual_batch=min(plan.usual_batch for plan in plans),
    )


def config_fields(plans: Mapping[str, str], run_batch: int) -> dict[str, Any]:
    """Return the configuration fields of plans (compute capability -> file, default first)."""
    return {
        "platform": ServedTensorRT.platform,
        "backend": ServedTensorRT.backend,
        "default_model_filename": next(iter(plans.values())),
        "cc_model_filenames": dict(plans) if len(plans) > 1 else {},
    }


SERVED = ServedTensorRT()
