# SPDX-License-Identifier: Apache-2.0
"""A plan deserialised: in the process that runs it, and first in one that may die of it.

As a file (`python loader.py`) it reads a line of JSON and the plan's bytes from standard input,
and answers with a line of JSON: what the engine takes and gives, and what its inspector says. It
imports nothing but TensorRT.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any


class NotLoaded(Exception):
    """TensorRT's own words."""


def deserialize(trt: Any, data: bytes, plugins: Sequence[str]) -> tuple[Any, Any]:
    """Runtime and engine; the runtime must live as long as the engine.

    Raises: NotLoaded if TensorRT refuses the plan or a plugin library.
    """
    messages: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                messages.append(text)

    for library in plugins:
        if not _registered(trt, library):
            raise NotLoaded(f"{library} cannot be loaded")
    runtime = trt.Runtime(Logger())
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise NotLoaded(messages[0] if messages else "no reason given")
    return runtime, engine


@cache  # a process's registry refuses plugins that it has
def _registered(trt: Any, library: str) -> bool:
    return trt.get_plugin_registry().load_library(library) is not None


def described(trt: Any, engine: Any) -> dict[str, Any]:
    """Inputs and outputs with their types and shapes, and the inspector's JSON."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    kinds: dict[str, list[dict[str, Any]]] = {"inputs": [], "outputs": []}
    for name in names:
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        kinds["inputs" if is_input else "outputs"].append(
            {
                "name": name,
                "type": engine.get_tensor_dtype(name).name,
                "shape": list(engine.get_tensor_shape(name)),
            }
        )
    inspector = engine.create_engine_inspector()
    said = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return {**kinds, "inspector": said}


def main() -> int:
    """Answer for one plan; 0 loaded, 2 refused."""
    request = json.loads(sys.stdin.buffer.readline())
    trt = import_module(request["module"])
    try:
        runtime, engine = deserialize(trt, sys.stdin.buffer.read(), request["plugins"])
    except NotLoaded as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return 2
    print(json.dumps(described(trt, engine)), flush=True)
    del engine, runtime
    return 0


if __name__ == "__main__":
    sys.exit(main())
