# SPDX-License-Identifier: Apache-2.0
"""Deserialize a plan, first in a separate process that may crash, then in the one that runs it.

As a worker, it answers with the engine's inputs and outputs and its inspector's JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from saccade.core.errors import SaccadeError


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
