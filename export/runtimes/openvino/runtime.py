# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a runtime: fp32, bf16 and int8 on CPUs, from the exported files."""

from collections.abc import Mapping
from importlib.util import find_spec

from saccade.core.errors import SaccadeError, install
from saccade.core.machine import cores, version_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.openvino.model import (
    changed_graph,
    cpu_has_bf16,
    is_changed,
    openvino_module,
    openvino_runner,
)
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import BuiltFolder, Packages
from saccade.plugins.execution import Ops


class OpenVino:
    """The runtime that computes bf16 and int8 fastest on CPUs with instructions for them."""

    name = "openvino"
    title = "OpenVINO"
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8")
    refusal = "computes in float32 on a CPU"
    packages: Packages | None = Packages(
        ("openvino",), needed_for="OpenVINO", optional=True, advice=install("openvino")
    )
    gpu_only = False
    builds = False
    builds_anywhere = False

    def is_here(self) -> bool:
        return find_spec(self.name) is not None

    def require(self) -> None:
        openvino_module()

    def label(self) -> str:
        return f"{self.name} {version_of(self.name)} CPU"

    def has_kernels(self) -> bool:
        return False

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> BuiltFolder:
        raise SaccadeError(f"{self.title} runs exported files: there is nothing to build.")

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        path = folder.file(manifest)
        model = changed_graph(path, manifest) if is_changed(manifest) else path
        return openvino_runner(model, manifest, threads=threads)

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """A runner for precisions that it computes differently from ONNX Runtime, if it can here.

        On a CPU without bfloat16 it would compute such a file in float32, which shows nothing.
        """
        precision = manifest.variant.precision
        if precision not in ("bf16", "int8") or not self.is_here():
            return {}
        if manifest.is_int8_for_gpu or (precision == "bf16" and not cpu_has_bf16()):
            return {}
        return {self.name: self.load(folder, manifest, None, threads=cores())}


OPENVINO = OpenVino()
