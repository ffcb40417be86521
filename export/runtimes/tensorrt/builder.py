# SPDX-License-Identifier: Apache-2.0
"""One engine by either of TensorRT's two modules: `python builder.py`, in a process of its own.

It reads request.json in its folder and writes one JSON object a line: what the network holds,
how far the build is, what TensorRT says. It builds when standard input says so, into `plan`.
It imports nothing but TensorRT. A plan's bytes follow the addresses of the builder's own objects,
so the process runs with a fixed address space, does the same each time, and builds one engine.
"""

import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

STEADY = {  # of the environment; the parent sets it
    "PYTHONHASHSEED": "0",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=4096"
    ":glibc.malloc.mmap_threshold=33554432",
}
_FIXED_ADDRESSES, _ASK = 0x0040000, 0xFFFFFFFF
_PR_SET_PDEATHSIG = 1
_AGAIN = "again"
_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM")
# What moves numbers and leaves them what they are.
_MOVES = ("SHUFFLE", "SQUEEZE", "UNSQUEEZE", "IDENTITY", "SLICE", "GATHER", "CONCATENATION")
_MIB = 2**20

Say = Callable[..., None]


class Refused(Exception):
    """What TensorRT did not accept; `kind` says which step."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def build(trt: Any, request: dict[str, Any], say: Say, go: Callable[[], bool]) -> bytes | None:
    """The plan of `request["onnx"]`; none if `go`, asked after parsing, says no.

    Raises: Refused with TensorRT's own words.
    """
    logger = _logger(trt, say)
    plugins = trt.get_plugin_registry()
    for library in request["plugins"]:
        if plugins.load_library(library) is None:
            raise Refused("plugin", f"{library} cannot be loaded")
    builder = trt.Builder(logger)
    builder.max_threads = 1
    # TensorRT 10 would otherwise choose types itself; later ones know no other network.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(Path(request["onnx"]).read_bytes()):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise Refused("onnx", errors[0] if errors else "no reason given")
    say("network", version=trt.__version__, **_described(trt, network))
    if not go():
        return None
    monitor = _monitor(trt, say)
    config = _config(trt, builder, network, request, monitor)
    started = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise Refused("build", "no plan")
    data = bytes(plan)
    if request["timing_cache"] is not None:
        Path("timing_cache").write_bytes(bytes(config.get_timing_cache().serialize()))
    say("built", seconds=time.perf_counter() - started)
    return data


def _config(trt: Any, builder: Any, network: Any, request: dict[str, Any], monitor: Any) -> Any:
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    # On by default: float32 products would lose 13 bits of their factors.
    config.clear_flag(trt.BuilderFlag.TF32)
    # With names alone the inspector could not say in which types an engine computes.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request["workspace_mib"] is not None:
        pool = trt.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, request["workspace_mib"] * _MIB)
    profile = builder.create_optimization_profile()
    for name, shapes in request["profiles"].items():
        profile.set_shape(name, *(tuple(shapes[key]) for key in ("min", "opt", "max")))
    if config.add_optimization_profile(profile) < 0:
        raise Refused("profile", json.dumps(request["profiles"]))
    if request["engine"] == "tensorrt-rtx":
        wanted = [f"SM{each.replace('.', '')}" for each in request["compute_capabilities"]]
        config.num_compute_capabilities = len(wanted)
        for index, name in enumerate(wanted):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, name), index):
                raise Refused("capability", name)
    if request["timing_cache"] is not None:
        path = Path(request["timing_cache"])
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise Refused("timing cache", "made by another version or for another GPU")
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
    """The factors of a product; a bias is none."""
    found = [layer.get_input(index) for index in range(layer.num_inputs)]
    return [tensor for tensor in found[:2] if tensor is not None]


def _origin(tensor: Any, makers: dict[str, Any]) -> str:
    """The type of the layer whose numbers these are, wherever they were moved to."""
    layer = makers.get(tensor.name)
    while layer is not None and layer.type.name in _MOVES:
        layer = makers.get(layer.get_input(0).name)
    return "INPUT" if layer is None else str(layer.type.name)


def _logger(trt: Any, say: Say) -> Any:
    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                say("message", severity=severity.name, text=text)

    return Logger()


def _monitor(trt: Any, say: Say) -> Any:
    class Monitor(trt.IProgressMonitor):
        """Reports the outermost phase: those inside it come and go."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outer = ""

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.outer = name
                say("phase", name=name, steps=steps)

        def step_complete(self, name: str, step: int) -> bool:
            if name == self.outer:
                say("step", name=name, step=step)
            return True

        def phase_finish(self, name: str) -> None:
            pass

    return Monitor()


def main() -> int:
    """Serve one request; 0 built or told not to, 2 refused."""
    if _AGAIN not in sys.argv and _fix_addresses():
        os.execv(sys.executable, [sys.executable, "-P", __file__, _AGAIN])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    warnings.simplefilter("ignore")

    def say(event: str, **found: Any) -> None:
        # One call a line: the monitor may be told by several threads.
        sys.stdout.write(json.dumps({"event": event, **found}) + "\n")
        sys.stdout.flush()

    def go() -> bool:
        return sys.stdin.readline() == "build\n"

    request = json.loads(Path("request.json").read_text("utf-8"))
    try:
        plan = build(import_module(request["module"]), request, say, go)
    except Refused as refused:
        say("refused", kind=refused.kind, text=str(refused))
        return 2
    except OSError as error:
        say("refused", kind="file", text=str(error))
        return 2
    if plan is None:
        return 0
    try:
        Path("plan").write_bytes(plan)
    except OSError as error:
        say("refused", kind="file", text=str(error))
        return 2
    say("done", fixed_addresses=_AGAIN in sys.argv, bytes=len(plan))
    return 0


def _fix_addresses() -> bool:
    """Whether this process may choose; a container's seccomp profile may forbid it."""
    libc = ctypes.CDLL(None)
    now = libc.personality(_ASK)
    return now >= 0 and libc.personality(now | _FIXED_ADDRESSES) >= 0


if __name__ == "__main__":
    sys.exit(main())
