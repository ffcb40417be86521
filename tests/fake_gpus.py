# SPDX-License-Identifier: Apache-2.0
"""Fake GPUs for this process and for workers of bulk jobs.

FAKE_GPUS lists their compute capabilities, such as 8.9,9.0. CUDA_VISIBLE_DEVICES hides some, as
with the real driver. With FAKE_CUDA, ONNX Runtime has its CUDA provider. A worker that uses a GPU
records the devices that it saw in the folder FAKE_SEEN.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import onnxruntime
from engine_places import HostMemory

from saccade.exporter.runtimes.tensorrt import loading
from saccade.serving.bulk import shard

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_notes: Path | None = None  # of a worker
_library, _session = ctypes.CDLL, onnxruntime.InferenceSession


def listed(variable: str) -> list[str]:
    """Return the items of a list in an environment variable."""
    return list(filter(None, os.environ.get(variable, "").split(",")))


def note() -> None:
    """Record which devices this worker saw."""
    if _notes is not None:
        _notes.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))


class Driver:
    """The used functions of libcuda and libnvidia-ml; each returns 0 on success."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        return call

    @property
    def cards(self) -> list[str]:
        """The compute capabilities of visible GPUs, in the order of the list."""
        every = listed("FAKE_GPUS")
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return every
        return [every[int(index)] for index in listed("CUDA_VISIBLE_DEVICES")]

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        note()
        count._obj.value = len(self.cards)

    def _cuDeviceGet(self, device: Any, index: int) -> None:  # noqa: N802
        device._obj.value = index

    def _cuDeviceGetName(self, text: Any, _: int, device: Any) -> None:  # noqa: N802
        text.value = f"a card of {self.cards[device.value]}".encode()

    def _cuDeviceGetAttribute(self, found: Any, which: int, device: Any) -> None:  # noqa: N802
        found._obj.value = int(self.cards[device.value].split(".")[which - 75])


class Session:
    """An ONNX Runtime session on a GPU, simulated by the CPU."""

    asked: tuple[list[Any], ...] = ()
    started = (CUDA, CPU)

    def __init__(self, source: str, options: Any, providers: list[Any]) -> None:
        Session.asked += (providers,)
        if (CUDA, {"use_tf32": "0"}) in providers:
            note()
        self._real = _session(source, options, providers=[CPU])

    def get_providers(self) -> tuple[str, ...]:
        """Return the providers that it reports as started."""
        return self.started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def library(name: str | None, *arguments: Any, **options: Any) -> Any:
    """Replace `ctypes.CDLL`."""
    if name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        return Driver()
    return _library(name, *arguments, **options)


def install() -> None:
    """Install the fake GPUs in this process, a worker."""
    global _notes
    _notes = Path(os.environ["FAKE_SEEN"]) / str(os.getpid())
    ctypes.CDLL = library  # type: ignore[assignment,misc]
    loading.CudaMemory = HostMemory  # type: ignore[assignment,misc]
    if "FAKE_CUDA" in os.environ:
        onnxruntime.get_available_providers = lambda: [CUDA, CPU]
        onnxruntime.InferenceSession = Session


def main(request: shard.ShardRequest) -> shard.FinishedShard:
    """Run one shard as a worker does."""
    install()
    return shard.main(request)
