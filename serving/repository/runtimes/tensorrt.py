# SPDX-License-Identifier: Apache-2.0
"""TensorRT in a server: plans of `saccade build`, one per kind of GPU, each with a manifest."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import Gpu, gpu_at_hand
from saccade.exporter.runtimes.runners import Runner
from saccade.plugins.availability import TENSORRT_LIBRARY
from saccade.plugins.contract import Ops
from saccade.serving.repository.installation import LIBRARIES
from saccade.serving.repository.model_config import MAX_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import (
    NotChecked,
    RepositoryModel,
    Target,
    read_engine,
)
from saccade.serving.repository.runtimes.served_runtime import (
    ONNXRUNTIMES_OWN,
    ModelCheck,
    ServedFiles,
    ServedRuntime,
    StoredFile,
    refuse_options,
)
from saccade.serving.repository.stored_sample import read_sample

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest

PLAN_FILE = "model.plan"
MAX_IMAGES_FLAG = "--max-images"


@dataclass(frozen=True)
class EnginePlan:
    """A component's plan for one kind of GPU, and the folder of its file."""

    folder: Path
    engine: "EngineManifest"

    @property
    def capability(self) -> str:
        """The compute capability that the plan was built for."""
        return self.engine.compute_capabilities[0]

    @property
    def max_batch(self) -> int:
        """The largest batch that its profiles take."""
        return min(profile["max"][0] for profile in self.engine.profiles.values())

    @property
    def usual_batch(self) -> int:
        """The batch that the plan was tuned for."""
        return min(profile["opt"][0] for profile in self.engine.profiles.values())


class SmallProfile(SaccadeError):
    """Raised when a plan takes fewer images than a request may have.

    The message recommends `MAX_IMAGES_FLAG`.
    """


Plans = Mapping[str, tuple[EnginePlan, ...]]  # by the component's name; the first is the default


def plan_files(capabilities: Sequence[str]) -> dict[str, str]:
    """Return each plan's name in the version folder; a single plan has the server's default."""
    if len(capabilities) == 1:
        return {capabilities[0]: PLAN_FILE}
    return {capability: f"model-{capability}.plan" for capability in capabilities}


def engine_file(capability: str) -> str:
    """Return the name of a plan's manifest, a file next to the model's configuration."""
    return f"engine-{capability}.json"


def read_plans(folders: Sequence[str], manifests: Sequence[Manifest]) -> Plans:
    """Read the plan of every component from every folder.

    Raises: SaccadeError if a folder lacks a component, has a plan of another ONNX file, of
        TensorRT-RTX or with an unsuitable profile, or if two folders are for the same GPU.
    """
    from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engines

    parts = {manifest.variant.name: manifest for manifest in manifests}
    by_name: dict[str, list[EnginePlan]] = {name: [] for name in parts}
    for folder in map(Path, folders):
        engines = {engine.variant.name: engine for engine in read_engines(folder)}
        for name, manifest in parts.items():
            if name not in engines:
                raise SaccadeError(
                    f"{folder}: has no plan of {name}. Build all variants of the artefact with: "
                    "saccade build ARTEFACT --engine tensorrt"
                )
            plan = EnginePlan(folder, engines[name])
            check_plan(folder / plan.engine.file.name, plan.engine, manifest)
            by_name[name].append(plan)
    for name, plans in by_name.items():
        capabilities = [plan.capability for plan in plans]
        if len(set(capabilities)) < len(capabilities):
            raise SaccadeError(
                f"{name}: two plans are for compute capability "
                f"{max(capabilities, key=capabilities.count)}. Name one folder per kind of GPU."
            )
    return {name: tuple(plans) for name, plans in by_name.items()}


def check_plan(path: Path, engine: "EngineManifest", manifest: Manifest) -> None:
    """Check that a plan was built from this ONNX file, and that Triton's backend can load it.

    Raises: SaccadeError otherwise.
    """
    if engine.engine != "tensorrt":  # the engine of Triton's backend
        raise SaccadeError(
            f"{path}: was built with TensorRT-RTX, but Triton's TensorRT backend loads only plans "
            "of TensorRT. Build it with: saccade build ARTEFACT --engine tensorrt"
        )
    if engine.parent.sha256 != manifest.file.sha256:
        raise SaccadeError(
            f"{path}: was built from an ONNX file with SHA-256 {engine.parent.sha256[:12]}..., but "
            f"{manifest.file.name} has {manifest.file.sha256[:12]}.... Build it again."
        )
    if len(engine.compute_capabilities) != 1:
        raise SaccadeError(
            f"{path}: is for the compute capabilities {', '.join(engine.compute_capabilities)}, "
            "expected one. Build one plan per kind of GPU."
        )
    for kind in ("inputs", "outputs"):
        ours, its = (set(getattr(owner, kind)) for owner in (manifest, engine))
        if odd := sorted(f"{spec.name} {spec.dtype} [{spec.axes}]" for spec in ours ^ its):
            raise SaccadeError(
                f"{path}: its {kind} differ from those of {manifest.file.name}: only one of them "
                f"has {odd[0]}. Build it again."
            )
    for name in (spec.name for spec in manifest.inputs):
        profile = engine.profiles.get(name)
        if profile is None or profile["min"][0] != 1:
            raise SaccadeError(
                f"{path}: has no profile of {name!r} that starts at batch 1. Build it again with "
                "--batch 1:8:64."
            )


def check_batches(plans: Plans, max_images: int) -> None:
    """Check that every plan takes as many images as the router admits.

    Raises: SmallProfile that names the plan and both remedies.
    """
    for name, own in plans.items():
        for plan in own:
            if plan.max_batch < max_images:
                raise SmallProfile(
                    f"{plan.folder / plan.engine.file.name}: its profile takes up to "
                    f"{plan.max_batch} images, but a request may have {max_images}. Pass "
                    f"{MAX_IMAGES_FLAG} {plan.max_batch}, or build {name} again with "
                    f"--batch 1:{plan.usual_batch}:{max_images}."
                )


def check_engines(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that every plan has a manifest and matches it."""
    for path in sorted(model.folder.glob("engine-*.json")):
        try:
            read_engine(path)
        except SaccadeError as error:
            yield str(error)
    names = plan_files(tuple(model.engines))
    for capability, engine in model.engines.items():
        plan = model.version / names[capability]
        if plan.is_file() and sha256_of(plan) != engine.file.sha256:
            yield (
                f"{plan.name} is not the plan of {engine_file(capability)}. A plan is executable "
                "code: saccade serves only plans that it built. Write the repository again."
            )
        yield from _fitting(model, capability, engine)
    if target.tensorrt is None:
        raise NotChecked(
            "plans were built with TensorRT "
            + ", ".join(sorted({engine.version for engine in model.engines.values()}))
            + ". To compare this with the server's version, pass --tensorrt-version VERSION"
        )
    for capability, engine in model.engines.items():
        if _short(engine.version) != _short(target.tensorrt):
            yield (
                f"its plan for {capability} was built with TensorRT {engine.version}, but the "
                f"server has {target.tensorrt}. Build it with the server's version."
            )


def _fitting(model: RepositoryModel, capability: str, engine: "EngineManifest") -> Iterator[str]:
    try:
        check_plan(Path(engine_file(capability)), engine, model.manifest)
    except SaccadeError as error:
        yield str(error)
    if engine.compute_capabilities != (capability,):
        yield (
            f"{engine_file(capability)} is for {', '.join(engine.compute_capabilities)}, expected "
            f"{capability} from its name."
        )


def check_profiles(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that profiles take every batch that the configuration admits."""
    largest = model.config.max_batch_size
    shapes = {}
    if model.sampled and model.sample.is_file():
        shapes = {name: array.shape for name, array in read_sample(model.sample).inputs.items()}
    for capability, engine in model.engines.items():
        for name, profile in sorted(engine.profiles.items()):
            low, high = profile["min"], profile["max"]
            if low[0] > 1 or high[0] < largest:
                yield (
                    f"max_batch_size is {largest}, but the profile of {name!r} for {capability} "
                    f"takes {low[0]} to {high[0]}."
                )
            shape = shapes.get(name, low)
            if not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=False)):
                yield (
                    f"the stored sample's {name!r} is {list(shape)}, but the profile for "
                    f"{capability} takes {list(low)} to {list(high)}."
                )


def check_capabilities(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that there is a plan for each GPU of this machine."""
    for capability in sorted({gpu.capability for gpu in target.gpus} - set(model.engines)):
        yield (
            f"this machine has a GPU of compute capability {capability}, but the plans are for "
            f"{', '.join(model.engines)}."
        )
    if not target.gpus:
        raise NotChecked("this machine has no GPU to compare the plans with")


def check_plugins(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that all plans need the same library of plugins, and that it loads if it is here."""
    needed = {pair for engine in model.engines.values() for pair in engine.plugins.items()}
    names = sorted({name for name, _ in needed})
    absent = []
    for name in names:
        digests = sorted(digest for plugin, digest in needed if plugin == name)
        path = TENSORRT_LIBRARY.with_name(name)
        if len(digests) > 1:
            yield (
                f"its plans were built with different {name} files, but a server loads only one. "
                "Build them again with one."
            )
        elif not path.is_file():
            absent.append(name)
        elif sha256_of(path) != digests[0]:
            yield f"its plans were built with a different {name} than the one installed here."
        else:
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                yield f"{name} cannot be loaded ({error})."
    if absent:
        raise NotChecked(
            f"its plans call plugins of {', '.join(absent)}, which is not built here. The server "
            "loads it with --backend-config=tensorrt,plugins="
        )


def _short(version: str) -> tuple[str, ...]:
    # Plans work with one release (major, minor and patch), whatever the build number.
    return tuple(version.split(".")[:3])


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
