# SPDX-License-Identifier: Apache-2.0
"""The runners of a variant beyond ONNX Runtime's processor kernels that this machine has."""

from pathlib import Path

from saccade.errors import MissingPackage, require
from saccade.export.artefact.manifest import Manifest
from saccade.export.runtimes.runners import CUDA, Runner, onnx_runner, onnx_session
from saccade.export.runtimes.tensorrt.engine_manifest import (
    PLAN_SUFFIX,
    EngineManifest,
    manifest_of,
)
from saccade.export.runtimes.tensorrt.engine_runner import engine_runner
from saccade.export.runtimes.tensorrt.gpu import gpu_at_hand
from saccade.export.runtimes.tensorrt.modules import module_of


def gpu_runners(folder: Path, manifest: Manifest) -> dict[str, Runner]:
    """ONNX Runtime's CUDA provider and the engines in `engines/`, by what they are called.

    Empty without a GPU. An engine of another GPU, version or ONNX file is not asked; one that
    should run here and does not is an error.

    Raises: SaccadeError for an engine that this machine should be able to load and cannot.
    """
    gpu = gpu_at_hand()
    if gpu is None:
        return {}
    found: dict[str, Runner] = {}
    path = folder / manifest.file.name
    onnxruntime = require("onnxruntime", extra="cpu")
    if CUDA in onnxruntime.get_available_providers():
        found["onnxruntime-cuda"] = onnx_runner(onnx_session(path, provider=CUDA))
    for plan in sorted(folder.glob(f"engines/[!.]*/{manifest.variant.name}{PLAN_SUFFIX}")):
        engine = manifest_of(plan)
        is_ours = engine.parent.sha256 == manifest.file.sha256
        if is_ours and gpu.capability in engine.compute_capabilities and _is_read_here(engine):
            found[plan.parent.name] = engine_runner(plan)
    return found


def _is_read_here(engine: EngineManifest) -> bool:
    try:
        version: str = module_of(engine.engine).__version__
    except MissingPackage:
        return False
    return version == engine.version
