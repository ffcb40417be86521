# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of engines: the fake `tensorrt`, a fake GPU, broken files."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from places import module_at

from saccade.exporter.artefact.manifest import read_manifest, write_manifest
from saccade.exporter.runtimes.gpu import Gpu
from saccade.exporter.runtimes.tensorrt import build as build_module
from saccade.exporter.runtimes.tensorrt import loading, modules

FAKES = Path(__file__).with_name("fakes")
ADA = Gpu("a card of Ada", "8.9", "580.95", 2**34)
HOPPER = Gpu("a card of Hopper", "9.0", "1", 2**34)


def use_fake(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None = ADA) -> None:
    """Use the fake module here and in child processes, with the GPU that it needs."""
    fake = module_at(FAKES / "tensorrt.py")
    monkeypatch.setitem(sys.modules, "tensorrt", fake)  # hidden from other tests
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    for module in (modules, build_module, loading):
        monkeypatch.setattr(module, "gpu_at_hand", lambda: gpu)


def use_library(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Use a file in place of the plugin library, for the builder and the loader."""
    library = folder / "libsaccade_tensorrt.so"
    library.write_bytes(b"plugins")
    package = "saccade.exporter.runtimes.tensorrt"
    for module in ("build", "loading"):
        monkeypatch.setattr(f"{package}.{module}.TENSORRT_LIBRARY", library)
    return library


class HostMemory:
    """Replaces the GPU's memory: the fake reads and writes host memory."""

    def put(self, array: np.ndarray) -> tuple[Any, int]:
        held = np.ascontiguousarray(array)
        return held, held.ctypes.data

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, int]:
        held = np.zeros(shape, dtype)
        return held, held.ctypes.data

    def get(self, handle: Any) -> np.ndarray:
        return handle

    def stream(self) -> int:
        return 0

    def wait(self) -> None:
        pass


def computed_artefact(folder: Path, batch: str) -> tuple[Path, Path]:
    """Make an artefact of one variant and the folder of its plan, which the fake can run."""
    from tiny_artefacts import FULL, HALF, artefacts, manifest_of, onnx_model

    artefacts(folder, checkpoint=False)
    for path in folder.glob(f"{HALF}.*"):
        path.unlink()
    data = worded(onnx_model(), "COMPUTE").SerializeToString()
    (folder / f"{FULL}.onnx").write_bytes(data)
    parent = read_manifest(folder / f"{FULL}.manifest.json").parent
    write_manifest(folder, manifest_of("b1000", data, parent))
    with pytest.MonkeyPatch.context() as patch:
        use_fake(patch)
        options = build_module.BuildOptions("tensorrt", batch=batch)
        return folder, build_module.build(folder, options).folder


def worded(proto: onnx.ModelProto, words: str) -> onnx.ModelProto:
    """Return the graph with a doc string, which controls the fake."""
    proto.doc_string = words
    return proto
