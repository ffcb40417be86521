# SPDX-License-Identifier: Apache-2.0
"""A plan is executable code: what is checked before TensorRT sees a byte of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.tensorrt import loader
from saccade.exporter.runtimes.tensorrt.child import Network
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    AGAIN,
    EngineManifest,
    manifest_of,
    plan_bytes,
)
from saccade.exporter.runtimes.tensorrt.loader import Contents, NotLoaded, Plan, deserialize
from saccade.exporter.runtimes.tensorrt.modules import MODULES, NAMES, chosen_engine, module_of
from saccade.exporter.runtimes.tensorrt.type_proof import check_bindings
from saccade.files import sha256_of
from saccade.plugins.availability import TENSORRT_LIBRARY
from saccade.worker import Worker, WorkerEnded

_SECONDS = 300  # for a first deserialisation: TensorRT-RTX compiles for the GPU then


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialised engine, and what its manifest promises."""

    manifest: EngineManifest
    trt: Any
    runtime: Any  # must live as long as the engine
    engine: Any


def load_engine(plan: Path | str) -> LoadedEngine:
    """The engine of a plan that saccade built for this GPU and this version of TensorRT.

    The bytes are read and hashed once; a process that may die of them sees them first.

    Raises: SaccadeError for a plan without or with a foreign manifest, of another hash, version,
        GPU or plugin library, or one that cannot be deserialised; MissingPackage without TensorRT.
    """
    plan = Path(plan)
    manifest = manifest_of(plan)
    data = plan_bytes(plan.parent, manifest)
    check_fits(plan, manifest)
    look_inside(plan, manifest, data)
    trt = module_of(manifest.engine)
    try:
        runtime, engine = deserialize(trt, data, _libraries(manifest))
    except NotLoaded as error:
        raise _refused(plan, manifest, str(error)) from error
    return LoadedEngine(manifest, trt, runtime, engine)


def check_fits(plan: Path, manifest: EngineManifest) -> None:
    """The plan is for the TensorRT, the GPU and the plugins of this machine.

    Raises: SaccadeError otherwise, MissingPackage without TensorRT.
    """
    module = NAMES[chosen_engine(manifest.engine)]
    version = module_of(manifest.engine).__version__
    if version != manifest.version:
        raise SaccadeError(
            f"{plan}: was built by {module} {manifest.version}, installed is {version}, and a "
            f"plan is read by its own version only. Install that one, or build again. {AGAIN}"
        )
    wanted = ", ".join(manifest.compute_capabilities)
    gpu = gpu_at_hand()
    if gpu is None:
        raise SaccadeError(
            f"{plan}: an engine runs on an NVIDIA GPU, and neither a driver (libcuda.so.1) nor a "
            f"device was found. Run it where there is one of compute capability {wanted}."
        )
    if gpu.capability not in manifest.compute_capabilities:
        raise SaccadeError(
            f"{plan}: was built for compute capability {wanted}; {gpu.name} has {gpu.capability}. "
            f"Build it for this GPU with: saccade build ARTEFACT --engine {manifest.engine}"
        )
    for name, digest in manifest.plugins.items():
        if name != TENSORRT_LIBRARY.name or not TENSORRT_LIBRARY.exists():
            raise SaccadeError(
                f"{plan}: needs the plugin library {name}, which is not here. "
                "Build it with: make plugins-tensorrt TENSORRT_INCLUDE_DIR=DIR"
            )
        if (actual := sha256_of(TENSORRT_LIBRARY)) != digest:
            raise SaccadeError(
                f"{plan}: was built with another {name} (SHA-256 {digest[:12]}..., here "
                f"{actual[:12]}...). Put that library back, or build again. {AGAIN}"
            )


def look_inside(plan: Path, manifest: EngineManifest, data: bytes) -> Contents:
    """Deserialise in a throw-away process; what the engine takes, gives, and its inspector says.

    Raises: SaccadeError if TensorRT refuses it, its process dies or hangs, or the engine has
        other inputs or outputs than its manifest.
    """
    request = Plan(MODULES[manifest.engine], tuple(_libraries(manifest)), data)
    try:
        with Worker(loader.__name__) as worker:
            answer = worker.ask(request, Contents, _SECONDS)
    except WorkerEnded as ended:
        said = f"the process that tried ended ({ended}) {ended.last_words}".strip()
        raise _refused(plan, manifest, said) from ended
    except SaccadeError as error:
        raise _refused(plan, manifest, str(error)) from error
    network = Network(manifest.version, answer.inputs, answer.outputs, 0, ())
    check_bindings(str(plan), network, manifest.inputs, manifest.outputs)
    return answer


def _libraries(manifest: EngineManifest) -> list[str]:
    return [str(TENSORRT_LIBRARY)] if manifest.plugins else []


def _refused(plan: Path, manifest: EngineManifest, said: str) -> SaccadeError:
    module = f"{NAMES[manifest.engine]} {manifest.version}"
    return SaccadeError(f"{plan}: {module} cannot deserialise it: {said}. {AGAIN}")
