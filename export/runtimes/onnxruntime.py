# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: runs the exported file itself, with kernels for custom ops if available."""

from collections.abc import Mapping
from importlib.util import find_spec

from saccade.core.errors import SaccadeError, install, require
from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.runners import CUDA, Runner, onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import BuildOptions, BuiltFolder, Packages
from saccade.plugins.contract import Ops
from saccade.plugins.native.library import available_library


class OnnxRuntime:
    """The runtime that needs no build, which is why the gate uses it for exported files."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    precisions: tuple[str, ...] = ("fp32", "fp16", "int8")
    refusal = "cannot compute on a CPU and whose opset older containers cannot read"
    packages: Packages | None = Packages(
        distributions=("onnxruntime", "onnxruntime-gpu"),
        needed_for="export, serve, bench",
        optional=False,
        advice=f"{install('cpu')}; with an NVIDIA GPU, use the extra `gpu` instead",
        conflict="both install the same module: pip uninstall both, then install one of the extras",
    )
    gpu_only = False
    builds = False
    builds_anywhere = False

    def is_here(self) -> bool:
        return find_spec(self.name) is not None

    def require(self) -> None:
        require(self.name, extra="cpu")

    def label(self) -> str:
        return this_machine().runtime

    def has_kernels(self) -> bool:
        return available_library() is not None

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> BuiltFolder:
        raise SaccadeError(f"{self.title} runs exported files: there is nothing to build.")

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        library = available_library() if ops == "kernels" and manifest.custom_ops else None
        session = onnx_session(folder.file(manifest), threads=threads, kernels=library)
        return onnx_runner(session)

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """The CUDA provider, if there is a GPU and ONNX Runtime has the provider."""
        if gpu_at_hand() is None:
            return {}
        onnxruntime = require(self.name, extra="cpu")
        if CUDA not in onnxruntime.get_available_providers():
            return {}
        session = onnx_session(folder.file(manifest), provider=CUDA)
        return {f"{self.name}-cuda": onnx_runner(session)}


ONNXRUNTIME = OnnxRuntime()
