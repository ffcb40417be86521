# SPDX-License-Identifier: Apache-2.0
"""Plans of `saccade build` for the components of an artefact folder: one a kind of GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.errors import SaccadeError
from saccade.exporter.artefact.manifest import Manifest

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest

PLAN_FILE = "model.plan"
RTX = (
    "was built with TensorRT-RTX, and Triton's TensorRT backend deserialises plans of TensorRT "
    "only. Build it with: saccade build ARTEFACT --engine tensorrt"
)


@dataclass(frozen=True)
class Plan:
    """A component's plan for one kind of GPU, and the folder where it lies."""

    folder: Path
    engine: "EngineManifest"

    @property
    def capability(self) -> str:
        """The compute capability that it was built for."""
        return self.engine.compute_capabilities[0]

    @property
    def max_batch(self) -> int:
        """The largest batch that its profile takes."""
        return min(profile["max"][0] for profile in self.engine.profiles.values())

    @property
    def usual_batch(self) -> int:
        """The batch that it was tuned for."""
        return min(profile["opt"][0] for profile in self.engine.profiles.values())


Plans = Mapping[str, tuple[Plan, ...]]  # by the name of the component, the first as default


def plan_files(capabilities: Sequence[str]) -> dict[str, str]:
    """Names in the version's folder; a single plan has the one that the server expects."""
    if len(capabilities) == 1:
        return {capabilities[0]: PLAN_FILE}
    return {capability: f"model-{capability}.plan" for capability in capabilities}


def engine_file(capability: str) -> str:
    """The plan's manifest, beside the model's configuration: inside the plan it would spoil it."""
    return f"engine-{capability}.json"


def read_plans(folders: Sequence[str], manifests: Sequence[Manifest]) -> Plans:
    """The plan of every component in every folder.

    Raises: SaccadeError if a folder lacks a component, holds a plan of another ONNX file, of
        TensorRT-RTX or of a profile that does not fit, or two folders are for the same GPU.
    """
    from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engines

    parts = {manifest.variant.name: manifest for manifest in manifests}
    by_name: dict[str, list[Plan]] = {name: [] for name in parts}
    for folder in map(Path, folders):
        engines = {engine.variant.name: engine for engine in read_engines(folder)}
        for name, manifest in parts.items():
            if name not in engines:
                raise SaccadeError(
                    f"{folder}: holds no plan of {name}. Build all variants of the artefact "
                    "with: saccade build ARTEFACT --engine tensorrt"
                )
            plan = Plan(folder, engines[name])
            check_plan(folder / plan.engine.file.name, plan.engine, manifest)
            by_name[name].append(plan)
    for name, plans in by_name.items():
        capabilities = [plan.capability for plan in plans]
        if len(set(capabilities)) < len(capabilities):
            raise SaccadeError(
                f"{name}: two plans are for compute capability "
                f"{max(capabilities, key=capabilities.count)}. Name one folder a kind of GPU."
            )
    return {name: tuple(plans) for name, plans in by_name.items()}


def is_loadable(engine: "EngineManifest") -> bool:
    """True if Triton's backend deserialises it: its own runtime built it."""
    return engine.engine == "tensorrt"


def check_plan(path: Path, engine: "EngineManifest", manifest: Manifest) -> None:
    """Check that a plan is of this ONNX file and of a kind that Triton's backend can load.

    Raises: SaccadeError otherwise.
    """
    if not is_loadable(engine):
        raise SaccadeError(f"{path}: {RTX}")
    if engine.parent.sha256 != manifest.file.sha256:
        raise SaccadeError(
            f"{path}: was built from an ONNX file with SHA-256 {engine.parent.sha256[:12]}..., "
            f"{manifest.file.name} has {manifest.file.sha256[:12]}.... Build it again."
        )
    if len(engine.compute_capabilities) != 1:
        raise SaccadeError(
            f"{path}: is for the compute capabilities {', '.join(engine.compute_capabilities)}, "
            "expected one. Build a plan for each kind of GPU."
        )
    for kind in ("inputs", "outputs"):
        ours, its = (set(getattr(owner, kind)) for owner in (manifest, engine))
        if odd := sorted(f"{spec.name} {spec.dtype} [{spec.axes}]" for spec in ours ^ its):
            raise SaccadeError(
                f"{path}: its {kind} are not those of {manifest.file.name}: {odd[0]} is of one of "
                "them only. Build it again."
            )
    for name in (spec.name for spec in manifest.inputs):
        profile = engine.profiles.get(name)
        if profile is None or profile["min"][0] != 1:
            raise SaccadeError(
                f"{path}: has no profile of {name!r} from batch 1 on. Build it again, with "
                "--batch 1:8:64."
            )


def check_batches(plans: Plans, max_images: int) -> None:
    """Check that every plan takes what the router lets through.

    Raises: SaccadeError naming the plan and both ways out.
    """
    for name, own in plans.items():
        for plan in own:
            if plan.max_batch < max_images:
                raise SaccadeError(
                    f"{plan.folder / plan.engine.file.name}: its profile takes up to "
                    f"{plan.max_batch} images, the router lets {max_images} through. Pass "
                    f"--max-images {plan.max_batch}, or build {name} again with "
                    f"--batch 1:{plan.usual_batch}:{max_images}."
                )
