# SPDX-License-Identifier: Apache-2.0
"""Run an engine in the same way as the reference: as a function of named arrays."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, require
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest, Profile
from saccade.exporter.runtimes.tensorrt.loading import LoadedEngine, load_engine
from saccade.models.interface import Arrays


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
