# SPDX-License-Identifier: Apache-2.0
"""Load and run a plan. It is executable code, so it is checked before TensorRT reads it.

A separate process that may crash deserializes it first: as a worker, `main` answers with the
engine's inputs and outputs and its inspector's JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, require
from saccade.core.files import check_digest, sha256_of
from saccade.core.worker import Worker, WorkerEnded
from saccade.exporter.runtimes.gpu import Gpu, gpu_at_hand
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.tensorrt.child import Network
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    AGAIN,
    EngineManifest,
    Profile,
    manifest_of,
    plan_bytes,
)
from saccade.exporter.runtimes.tensorrt.layer_types import check_bindings
from saccade.exporter.runtimes.tensorrt.modules import MODULES, NAMES, chosen_engine, module_of
from saccade.models.interface import Arrays
from saccade.plugins.availability import TENSORRT_LIBRARY

_SECONDS = 300  # for the first deserialization, when TensorRT-RTX compiles for the GPU


class NotLoaded(SaccadeError):
    """TensorRT refused to load a plan; the message is TensorRT's own."""


@dataclass(frozen=True)
class LoadedPlan:
    """The bytes of a plan, the module that reads them, and its plugin libraries."""

    module: str
    plugins: tuple[str, ...]
    data: bytes


@dataclass(frozen=True)
class Contents:
    """The inputs and outputs of an engine with types and shapes, and the inspector's JSON."""

    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    inspector: str


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialized engine and its manifest."""

    manifest: EngineManifest
    trt: Any
    runtime: Any  # must live as long as the engine
    engine: Any


def load_engine(plan: Path | str, manifest: EngineManifest | None = None) -> LoadedEngine:
    """Load a plan that saccade built for this GPU and this version of TensorRT.

    If `manifest` is not given, the one next to the plan is read. The bytes are read and hashed
    once. A separate process, which may crash, deserializes them first.

    Raises: SaccadeError for a plan with a missing or wrong manifest, another hash, version, GPU or
        plugin library, or if it cannot be deserialized; MissingPackage without TensorRT.
    """
    plan = Path(plan)
    manifest = manifest or manifest_of(plan)
    data = plan_bytes(plan, manifest)
    check_fits(plan, manifest, gpu_at_hand())
    look_inside(plan, manifest, data)
    trt = module_of(manifest.engine)
    try:
        runtime, engine = deserialize(trt, data, _libraries(manifest))
    except NotLoaded as error:
        raise _refused(plan, manifest, str(error)) from error
    return LoadedEngine(manifest, trt, runtime, engine)


def check_fits(plan: Path, manifest: EngineManifest, gpu: Gpu | None) -> None:
    """Check that a plan fits the GPU, TensorRT and plugins of this machine.

    Raises: SaccadeError otherwise, MissingPackage without TensorRT.
    """
    module = NAMES[chosen_engine(manifest.engine)]
    version = module_of(manifest.engine).__version__
    if version != manifest.version:
        raise SaccadeError(
            f"{plan}: was built with {module} {manifest.version}, but {version} is installed, and "
            "only the version that built a plan can read it. Install that version, or build again "
            "with: saccade build ARTEFACT"
        )
    wanted = ", ".join(manifest.compute_capabilities)
    if gpu is None:
        raise SaccadeError(
            f"{plan}: needs an NVIDIA GPU, but no driver (libcuda.so.1) or no device was found. "
            f"Run it on a machine with a GPU of compute capability {wanted}."
        )
    if gpu.capability not in manifest.compute_capabilities:
        raise SaccadeError(
            f"{plan}: was built for compute capability {wanted}; {gpu.name} has {gpu.capability}. "
            f"Build it for this GPU with: saccade build ARTEFACT --engine {manifest.engine}"
        )
    for name, digest in manifest.plugins.items():
        if name != TENSORRT_LIBRARY.name or not TENSORRT_LIBRARY.exists():
            raise SaccadeError(
                f"{plan}: needs the plugin library {name}, which is missing. "
                "Build it with: make plugins-tensorrt TENSORRT_INCLUDE_DIR=DIR"
            )
        put_back = "Put that library back, or build again with: saccade build ARTEFACT"
        actual = sha256_of(TENSORRT_LIBRARY)
        check_digest(TENSORRT_LIBRARY, actual, digest, f"when {plan} was built", put_back)


def look_inside(plan: Path, manifest: EngineManifest, data: bytes) -> Contents:
    """Deserialize in a throwaway process; return inputs, outputs and the inspector's JSON.

    Raises: SaccadeError if TensorRT refuses it, the process dies or hangs, or the engine has
        other inputs or outputs than its manifest.
    """
    request = LoadedPlan(MODULES[manifest.engine], tuple(_libraries(manifest)), data)
    try:
        with Worker(__name__) as worker:
            answer = worker.ask(request, Contents, _SECONDS)
    except WorkerEnded as ended:
        said = f"the process that tried it failed ({ended}) {ended.last_words}".strip()
        raise _refused(plan, manifest, said) from ended
    except SaccadeError as error:
        raise _refused(plan, manifest, str(error)) from error
    network = Network(manifest.version, answer.inputs, answer.outputs, 0, ())
    check_bindings(str(plan), network, manifest.inputs, manifest.outputs, AGAIN)
    return answer


def _libraries(manifest: EngineManifest) -> list[str]:
    return [str(TENSORRT_LIBRARY)] if manifest.plugins else []


def _refused(plan: Path, manifest: EngineManifest, said: str) -> SaccadeError:
    module = f"{NAMES[manifest.engine]} {manifest.version}"
    return SaccadeError(f"{plan}: {module} cannot deserialize it: {said}. {AGAIN}")


def deserialize(trt: Any, data: bytes, plugins: Sequence[str]) -> tuple[Any, Any]:
    """Return runtime and engine. Keep the runtime alive as long as the engine.

    Raises: NotLoaded if TensorRT refuses the plan or a plugin library.
    """
    messages: list[str] = []

    class LoaderLogger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                messages.append(text)

    for library in plugins:
        if not _registered(trt, library):
            raise NotLoaded(f"{library} cannot be loaded")
    runtime = trt.Runtime(LoaderLogger())
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise NotLoaded(messages[0] if messages else "no reason given")
    return runtime, engine


@cache  # a process's registry refuses plugins that it already has
def _registered(trt: Any, library: str) -> bool:
    return trt.get_plugin_registry().load_library(library) is not None


def main(plan: LoadedPlan) -> Contents:
    """Deserialize a plan."""
    trt = import_module(plan.module)
    runtime, engine = deserialize(trt, plan.data, plan.plugins)
    contents = _contents(trt, engine)
    del engine, runtime  # the order matters
    return contents


def _contents(trt: Any, engine: Any) -> Contents:
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    modes: dict[Any, list[dict[str, Any]]] = {
        trt.TensorIOMode.INPUT: [],
        trt.TensorIOMode.OUTPUT: [],
    }
    for name in names:
        kind, shape = engine.get_tensor_dtype(name).name, list(engine.get_tensor_shape(name))
        modes[engine.get_tensor_mode(name)].append({"name": name, "type": kind, "shape": shape})
    inspector = engine.create_engine_inspector()
    said = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    inputs, outputs = (tuple(mode) for mode in modes.values())
    return Contents(inputs, outputs, said)


class EngineMemory(Protocol):
    """Memory for an engine's tensors; a handle keeps its memory alive."""

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        """Copy the array; return handle and address."""
        ...

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        """Allocate memory without filling it; return handle and address."""
        ...

    def get(self, handle: Any) -> np.ndarray:
        """Return the numbers in it."""
        ...

    def stream(self) -> int:
        """Return the CUDA stream of all operations."""
        ...

    def wait(self) -> None:
        """Wait until the stream is done."""
        ...


class CudaMemory:
    """GPU memory, allocated by torch."""

    def __init__(self) -> None:
        self._torch = require("torch", extra="export")
        if not self._torch.cuda.is_available():
            raise SaccadeError(
                f"torch {self._torch.__version__} has no CUDA, which is needed to copy an engine's "
                "inputs to the GPU. Install a build of torch with CUDA."
            )
        self._stream = self._torch.cuda.Stream()

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        with self._torch.cuda.stream(self._stream):
            tensor = self._torch.from_numpy(np.ascontiguousarray(array)).to("cuda")
        return tensor, tensor.data_ptr()

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        kind = getattr(self._torch, dtype.name)
        with self._torch.cuda.stream(self._stream):
            tensor = self._torch.empty(shape, dtype=kind, device="cuda")
        return tensor, tensor.data_ptr()

    def get(self, handle: Any) -> np.ndarray:
        array: np.ndarray = handle.cpu().numpy()
        return array

    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def wait(self) -> None:
        self._stream.synchronize()


def engine_runner(plan: Path | str, manifest: EngineManifest | None = None) -> Runner:
    """Check and load a plan, and return it as a function; for `manifest` see `load_engine`.

    Raises: SaccadeError as in `load_engine`, and if torch has no CUDA.
    """
    return runner_of(load_engine(plan, manifest), CudaMemory())


def runner_of(loaded: LoadedEngine, memory: EngineMemory) -> Runner:
    """Return a loaded engine as a function of named arrays.

    Raises: ShapeError, when called, for a shape outside the profile.
    """
    manifest, context = loaded.manifest, loaded.engine.create_execution_context()

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        held = []
        for spec in manifest.inputs:
            array = inputs[spec.name]
            check_shape(spec.name, array.shape, manifest.profiles[spec.name])
            if array.dtype.name != spec.dtype:
                raise ShapeError(f"{spec.name!r} is {array.dtype.name}, expected {spec.dtype}.")
            handle, address = memory.put(array)
            held.append(handle)
            context.set_input_shape(spec.name, array.shape)
            context.set_tensor_address(spec.name, address)
        outputs = {}
        for spec in manifest.outputs:
            shape = tuple(context.get_tensor_shape(spec.name))
            outputs[spec.name], address = memory.room(shape, np.dtype(spec.dtype))
            context.set_tensor_address(spec.name, address)
        if not context.execute_async_v3(memory.stream()):
            # Using `loaded` here also keeps the runtime alive, which the engine needs.
            raise SaccadeError(
                f"{loaded.manifest.variant.name}: the engine did not start. Check its GPU."
            )
        memory.wait()
        return {name: memory.get(handle) for name, handle in outputs.items()}

    return run


def check_shape(name: str, shape: tuple[int, ...], profile: Profile) -> None:
    """Check that a shape is in the range that the engine was built for.

    Raises: ShapeError naming the range.
    """
    least, most = profile["min"], profile["max"]
    fits = len(shape) == len(least)
    if not fits or not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
        raise ShapeError(
            f"{name!r} is {list(shape)}, expected {list(least)} to {list(most)}. "
            "Send fewer samples per call, or build the engine with a larger --batch."
        )
