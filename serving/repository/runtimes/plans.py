# SPDX-License-Identifier: Apache-2.0
"""Plans that `saccade build` wrote for the components of an artefact: one per kind of GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.manifest import Manifest

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest

PLAN_FILE = "model.plan"
MAX_IMAGES_FLAG = "--max-images"
RTX = (
    "was built with TensorRT-RTX, but Triton's TensorRT backend loads only plans of TensorRT. "
    "Build it with: saccade build ARTEFACT --engine tensorrt"
)


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


def is_loadable(engine: "EngineManifest") -> bool:
    """Return whether Triton's TensorRT backend can load a plan."""
    return engine.engine == "tensorrt"


def check_plan(path: Path, engine: "EngineManifest", manifest: Manifest) -> None:
    """Check that a plan was built from this ONNX file, and that Triton's backend can load it.

    Raises: SaccadeError otherwise.
    """
    if not is_loadable(engine):
        raise SaccadeError(f"{path}: {RTX}")
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
