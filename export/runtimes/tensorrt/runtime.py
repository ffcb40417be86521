# SPDX-License-Identifier: Apache-2.0
"""TensorRT and TensorRT-RTX: plans that are built from the exported file per kind of GPU."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import MissingPackage, SaccadeError, install
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.artefact.variant import PRECISIONS
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import BuildOptions, BuiltFolder, Packages
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    PLAN_SUFFIX,
    EngineManifest,
    manifest_of,
)
from saccade.exporter.runtimes.tensorrt.loading import engine_runner
from saccade.exporter.runtimes.tensorrt.modules import (
    MODULES,
    NAMES,
    chosen_engine,
    module_of,
    takes_plugins,
)
from saccade.plugins.availability import TENSORRT_LIBRARY
from saccade.plugins.contract import Ops


@dataclass(frozen=True)
class TensorRT:
    """One of the two modules; they share only their Python interface."""

    name: str
    packages: Packages | None
    builds_anywhere: bool
    precisions: tuple[str, ...] = PRECISIONS
    refusal: str = ""
    gpu_only: bool = True
    builds: bool = True

    @property
    def title(self) -> str:
        return NAMES[self.name]

    def is_here(self) -> bool:
        return importlib.util.find_spec(MODULES[self.name]) is not None

    def require(self) -> None:
        chosen_engine(self.name)

    def label(self) -> str:
        gpu = gpu_at_hand()
        return f"{self.name} {self._version()} {gpu.name if gpu else 'GPU'}"

    def _version(self) -> str:
        try:
            return str(module_of(self.name).__version__)
        except MissingPackage:
            return "unknown"

    def has_kernels(self) -> bool:
        """True if saccade's plugins are installed, so that new plans call them.

        Otherwise plans contain the function bodies.
        """
        return takes_plugins(self.name) and TENSORRT_LIBRARY.exists()

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> BuiltFolder:
        from saccade.exporter.runtimes.tensorrt.build import build

        return build(artefact, replace(options, engine=self.name))

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        plans = self._plans(folder, manifest)
        if not plans:
            raise SaccadeError(
                f"{folder}: has no plan of {manifest.variant.name} for this GPU. Build it with: "
                f"saccade build {folder} --engine {self.name}"
            )
        return engine_runner(next(iter(plans.values())))

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """Return the plans in `engines/` for this GPU, by the name of their folder.

        Plans for another GPU, version or ONNX file are skipped.
        """
        plans = self._plans(folder, manifest)
        return {name: engine_runner(plan) for name, plan in plans.items()}

    def _plans(self, folder: ArtefactFolder, manifest: Manifest) -> dict[str, Path]:
        gpu = gpu_at_hand()
        if gpu is None:
            return {}
        plans = {}
        for plan in sorted(folder.path.glob(f"engines/[!.]*/{manifest.variant.name}{PLAN_SUFFIX}")):
            engine = manifest_of(plan)
            is_ours = engine.engine == self.name and engine.parent.sha256 == manifest.file.sha256
            if is_ours and gpu.capability in engine.compute_capabilities and self._reads(engine):
                plans[plan.parent.name] = plan
        return plans

    def _reads(self, engine: EngineManifest) -> bool:
        return self._version() == engine.version


TENSORRT = TensorRT(
    name="tensorrt",
    packages=None,
    builds_anywhere=False,
)
TENSORRT_RTX = TensorRT(
    name="tensorrt-rtx",
    packages=Packages(
        distributions=("tensorrt-rtx-cu13",),
        needed_for="rtx",
        optional=True,
        advice=install("rtx"),
    ),
    builds_anywhere=True,
)
