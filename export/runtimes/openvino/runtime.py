# SPDX-License-Identifier: Apache-2.0
"""OpenVINO as a runtime: fp32, bf16 and int8 on CPUs, from the exported files."""

import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, install, require
from saccade.core.machine import cores, version_of
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import BuildOptions, BuiltFolder, Packages
from saccade.models.interface import Arrays
from saccade.plugins.contract import Ops

# Metadata of a graph that was made from an exported file: the SHA-256 of that file.
SOURCE = "saccade_exported_sha256"


def computes_bf16(manifest: Manifest) -> bool:
    """Return whether OpenVINO computes a file's products in bfloat16, if the CPU has the type.

    The body of a custom op is sensitive to rounding. A bf16 file that has some keeps its own types.
    """
    has_ops = bool(manifest.custom_ops or manifest.inlined_ops)
    return manifest.variant.precision == "bf16" and not has_ops


def is_changed(manifest: Manifest) -> bool:
    """Return whether OpenVINO cannot read the exported file as it is, or only slowly."""
    return bool(manifest.custom_ops) or computes_bf16(manifest)


def changed_graph(path: Path, manifest: Manifest) -> bytes:
    """Return the graph of an exported file for OpenVINO.

    It knows neither local functions nor custom ops, so these become the standard operators of their
    bodies. It fuses a product with what is around it only if no conversion of types is in between,
    so a graph to compute in bfloat16 is in float32, with the rounded weights.

    Raises: SaccadeError if the graph would be too large, MissingPackage if onnx is not installed.
    """
    require("onnx", extra="export")
    from saccade.exporter.graph.half_graph import widened
    from saccade.exporter.graph.limits import FILE_BYTES
    from saccade.exporter.graph.model_file import put_back, read_model
    from saccade.exporter.graph.precision import inlined

    half = computes_bf16(manifest)
    size = manifest.file.total_bytes * (2 if half else 1)
    if size > FILE_BYTES:
        raise SaccadeError(
            f"{path}: OpenVINO needs another form of this graph, with about {size / 2**20:,.0f} "
            f"MiB, at most {FILE_BYTES / 2**20:,.0f} MiB are possible. Use --runtime onnxruntime, "
            "or a variant in fp32 without custom ops."
        )
    proto, weights = read_model(path, manifest.file)
    if half:
        proto, weights = widened(proto, weights)
    proto = put_back(proto, weights)
    proto = inlined(proto) if manifest.custom_ops else proto
    proto.metadata_props.add(key=SOURCE, value=manifest.file.sha256)
    return bytes(proto.SerializeToString(deterministic=True))


def openvino_module() -> ModuleType:
    """Import OpenVINO without its telemetry.

    Raises: MissingPackage if it is not installed.
    """
    # Otherwise the import writes an identity into the home folder, from which it reports.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return require("openvino", extra="openvino")


def cpu_has_bf16() -> bool:
    """Return whether OpenVINO computes in bfloat16 here; otherwise it does so in float32."""
    capabilities = openvino_module().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "BF16" in capabilities


def openvino_runner(model: Path | bytes, manifest: Manifest, *, threads: int = 1) -> Runner:
    """Compile a graph for any batch size, and return it as a function.

    `model` is the exported file, or its `changed_graph` where OpenVINO needs that. `threads` is the
    number of threads of one run; 0: one per core.

    Raises: SaccadeError if OpenVINO refuses the file, MissingPackage if it is not installed.
    """
    openvino = openvino_module()
    core = openvino.Core()
    # The server's backend sets the same, so answers are the same.
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # By itself, OpenVINO computes float32 graphs in bfloat16 on CPUs that have it.
        "INFERENCE_PRECISION_HINT": "bf16" if computes_bf16(manifest) else "f32",
        # Several processes would be pinned to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        compiled = core.compile_model(core.read_model(model), "CPU", properties)
        ports = {spec.name: compiled.output(spec.name) for spec in manifest.outputs}
    except RuntimeError as error:
        where = manifest.file.name if isinstance(model, bytes) else model
        version = openvino.__version__.partition("-")[0]
        raise SaccadeError(
            f"{where}: OpenVINO {version} cannot load it ({_last_line(error)}). {AGAIN}"
        ) from error
    return _runner(compiled.create_infer_request(), ports)


def _runner(request: Any, ports: dict[str, Any]) -> Runner:
    one_at_a_time = threading.Lock()  # a request has one set of tensors

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        try:
            with one_at_a_time:
                answers = request.infer(dict(inputs), share_inputs=True)
        except RuntimeError as error:
            shapes = {name: value.shape for name, value in inputs.items()}
            raise SaccadeError(
                f"OpenVINO failed on inputs {shapes}: {_last_line(error)}"
            ) from error
        return {name: answers[port] for name, port in ports.items()}

    return run


def _last_line(error: Exception) -> str:
    """Return the reason; the lines before it are places in OpenVINO's sources."""
    return (str(error).strip().splitlines() or [repr(error)])[-1][:500]


class OpenVino:
    """The runtime that computes bf16 and int8 fastest on CPUs with instructions for them."""

    name = "openvino"
    title = "OpenVINO"
    precisions: tuple[str, ...] = ("fp32", "bf16", "int8")
    refusal = "computes in float32 on a CPU"
    packages: Packages | None = Packages(
        ("openvino",), needed_for="OpenVINO", optional=True, advice=install("openvino")
    )
    gpu_only = False
    builds = False
    builds_anywhere = False

    def is_here(self) -> bool:
        return find_spec(self.name) is not None

    def require(self) -> None:
        openvino_module()

    def label(self) -> str:
        return f"{self.name} {version_of(self.name)} CPU"

    def has_kernels(self) -> bool:
        return False

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> BuiltFolder:
        raise SaccadeError(f"{self.title} runs exported files: there is nothing to build.")

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        path = folder.file(manifest)
        model = changed_graph(path, manifest) if is_changed(manifest) else path
        return openvino_runner(model, manifest, threads=threads)

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """A runner for precisions that it computes differently from ONNX Runtime, if it can here.

        On a CPU without bfloat16 it would compute such a file in float32, which shows nothing.
        """
        precision = manifest.variant.precision
        if precision not in ("bf16", "int8") or not self.is_here():
            return {}
        if manifest.is_int8_for_gpu or (precision == "bf16" and not cpu_has_bf16()):
            return {}
        return {self.name: self.load(folder, manifest, None, threads=cores())}


OPENVINO = OpenVino()
