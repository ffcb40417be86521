# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: it runs the exported file itself, custom ops by kernels where they can be built."""

from collections.abc import Mapping
from importlib.util import find_spec

from saccade.errors import SaccadeError, install, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runners import CUDA, Runner, onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import Built, Packages
from saccade.machine import this_machine
from saccade.plugins.execution import Ops
from saccade.plugins.native.library import available_library


class OnnxRuntime:
    """The one runtime that needs nothing built, and so the one that proves what was exported."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    precisions: tuple[str, ...] = ("fp32", "fp16", "int8")
    refusal = "has no kernels for on a CPU and whose opset older containers do not read"
    packages: Packages | None = Packages(
        distributions=("onnxruntime", "onnxruntime-gpu"),
        needed_for="export, serve, bench",
        optional=False,
        advice=f"{install('cpu')}; with an NVIDIA GPU the extra `gpu` instead",
        conflict="both write the same package: pip uninstall both, then install one of the extras",
    )
    gpu_only = False
    builds = False
    builds_anywhere = False
    served: str | None = "saccade.serving.repository.runtimes.onnxruntime:SERVED"

    def is_here(self) -> bool:
        return find_spec(self.name) is not None

    def require(self) -> None:
        require(self.name, extra="cpu")

    def label(self) -> str:
        return this_machine().runtime

    def has_kernels(self) -> bool:
        return available_library() is not None

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> Built:
        raise SaccadeError(f"{self.title} runs the exported files: there is nothing to build.")

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        library = available_library() if ops == "kernels" and manifest.custom_ops else None
        session = onnx_session(folder.file(manifest), threads=threads, kernels=library)
        return onnx_runner(session)

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """Its CUDA provider, where there is a GPU and it has that."""
        if gpu_at_hand() is None:
            return {}
        onnxruntime = require(self.name, extra="cpu")
        if CUDA not in onnxruntime.get_available_providers():
            return {}
        session = onnx_session(folder.file(manifest), provider=CUDA)
        return {f"{self.name}-cuda": onnx_runner(session)}


ONNXRUNTIME = OnnxRuntime()
