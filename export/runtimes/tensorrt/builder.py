# SPDX-License-Identifier: Apache-2.0
"""Build one engine with either of TensorRT's two modules: `python builder.py`, in its own process.

It uses the protocol of `saccade.core.worker`. It answers the first request with a description of
the parsed network. The second request makes it build into the file `plan` of its folder, and the
answer is the result; meanwhile it reports progress and TensorRT's messages. It imports nothing but
TensorRT, and builds only one engine.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM")
# Layers that move numbers without changing them.
_MOVES = ("SHUFFLE", "SQUEEZE", "UNSQUEEZE", "IDENTITY", "SLICE", "GATHER", "CONCATENATION")
_MIB = 2**20

Tell = Callable[[str, Any], None]


class StepRefused(Exception):
    """TensorRT refused a step; `kind` is the step."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def build(
    trt: Any, request: dict[str, Any], tell: Tell, go: Callable[[], Any]
) -> tuple[bytes, float] | None:
    """Return the plan of `request["onnx"]` and its build time; None if `go` stops after parsing.

    Raises: StepRefused with TensorRT's own words.
    """
    logger = _logger(trt, tell)
    plugins = trt.get_plugin_registry()
    for library in request["plugins"]:
        if plugins.load_library(library) is None:
            raise StepRefused("plugin", f"{library} cannot be loaded")
    builder = trt.Builder(logger)
    builder.max_threads = 1
    # TensorRT 10 would otherwise choose types itself; later versions always are strongly typed.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    model = Path(request["onnx"])
    # The path tells where the data file is. It also goes into the plan, whose bytes then depend on
    # the folder, so a model without a data file is parsed without it.
    places = [str(model.absolute())] if list(model.parent.glob("*.data")) else []
    if not parser.parse(model.read_bytes(), *places):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise StepRefused("onnx", errors[0] if errors else "no reason given")
    tell("answer", {"version": trt.__version__, **_described(trt, network)})
    if not go():
        return None
    monitor = _monitor(trt, tell)
    config = _config(trt, builder, network, request, monitor)
    started = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - started
    if plan is None:
        raise StepRefused("build", "no plan")
    data = bytes(plan)
    if request["timing_cache"] is not None:
        Path("timing_cache").write_bytes(bytes(config.get_timing_cache().serialize()))
    return data, seconds


def _config(trt: Any, builder: Any, network: Any, request: dict[str, Any], monitor: Any) -> Any:
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    # TF32 is on by default: the factors of float32 products would lose 13 bits.
    config.clear_flag(trt.BuilderFlag.TF32)
    # By default the inspector reports only names, not the types in which an engine computes.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request["workspace_mib"] is not None:
        pool = trt.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, request["workspace_mib"] * _MIB)
    profile = builder.create_optimization_profile()
    for name, shapes in request["profiles"].items():
        profile.set_shape(name, *(tuple(shapes[key]) for key in ("min", "opt", "max")))
    if config.add_optimization_profile(profile) < 0:
        raise StepRefused("profile", json.dumps(request["profiles"]))
    if request["engine"] == "tensorrt-rtx":
        wanted = [
            f"SM{capability.replace('.', '')}" for capability in request["compute_capabilities"]
        ]
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name), index):
                raise StepRefused("capability", name)
    if request["timing_cache"] is not None:
        path = Path(request["timing_cache"])
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise StepRefused("timing cache", "made by another version or for another GPU")
    return config


def _described(trt: Any, network: Any) -> dict[str, Any]:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {}
    for layer in layers:
        for index in range(layer.num_outputs):
            makers[layer.get_output(index).name] = layer
    products = [layer for layer in layers if layer.type.name in _PRODUCTS]
    return {
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_tensor(network.get_output(i)) for i in range(network.num_outputs)],
        "layers": len(layers),
        "products": [
            {
                "name": layer.name,
                "type": layer.get_output(0).dtype.name,
                "inputs": [tensor.dtype.name for tensor in _inputs(layer)],
                "from": [_origin(tensor, makers) for tensor in _inputs(layer)],
            }
            for layer in products
        ],
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "type": tensor.dtype.name}


def _inputs(layer: Any) -> list[Any]:
    """The factors of a product, without the bias."""
    tensors = [layer.get_input(index) for index in range(layer.num_inputs)]
    return [tensor for tensor in tensors[:2] if tensor is not None]


def _origin(tensor: Any, makers: dict[str, Any]) -> str:
    """The type of the layer that computed these numbers, before any layers that only move them."""
    layer = makers.get(tensor.name)
    while layer is not None and layer.type.name in _MOVES:
        layer = makers.get(layer.get_input(0).name)
    return "INPUT" if layer is None else str(layer.type.name)


def _logger(trt: Any, tell: Tell) -> Any:
    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                tell("said", {"event": "message", "severity": severity.name, "text": text})

    return Logger()


def _monitor(trt: Any, tell: Tell) -> Any:
    class Monitor(trt.IProgressMonitor):
        """Report progress of the outermost phase; nested phases are ignored."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outer = ""

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.outer = name
                tell("said", {"event": "phase", "steps": steps})

        def step_complete(self, name: str, step: int) -> bool:
            if name == self.outer:
                tell("said", {"event": "step"})
            return True

        def phase_finish(self, name: str) -> None:
            pass

    return Monitor()


def main() -> None:
    """Build one engine."""
    warnings.simplefilter("ignore")
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library may print anything

    def tell(what: str, content: Any) -> None:
        # One call per line: several threads may call the monitor.
        lines.write(json.dumps([what, content]) + "\n")

    def next_request() -> Any:
        size = sys.stdin.buffer.readline()
        return json.loads(sys.stdin.buffer.read(int(size))) if size else None

    tell("ready", None)
    request = next_request()
    try:
        built = build(import_module(request["module"]), request, tell, next_request)
        if built is not None:
            plan, seconds = built
            Path("plan").write_bytes(plan)
            tell("answer", {"seconds": seconds})
    except StepRefused as refused:
        tell("error", [refused.kind, str(refused)])
    except OSError as error:
        tell("error", ["file", str(error)])


if __name__ == "__main__":
    main()
