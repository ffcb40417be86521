# SPDX-License-Identifier: Apache-2.0
"""The implementations of the ops that can run on this machine, and why others cannot."""

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError, install
from saccade.plugins.ops import OPS

TENSORRT_LIBRARY = Path(__file__).parent / "native" / "lib" / "libsaccade_tensorrt.so"


@dataclass(frozen=True)
class Implementation:
    """One implementation of all five ops."""

    name: str
    available: bool
    detail: str  # version or path if available, otherwise why not and what to do


def implementations() -> tuple[Implementation, ...]:
    """List all implementations, without building, starting or importing anything."""
    library = _kernels()
    return (
        Implementation("NumPy reference", True, "float64; the reference for all others"),
        _torch(library),
        _package("ONNX function body", "onnx", "export"),
        _onnxruntime(library),
        library,
        _tensorrt(),
    )


def describe() -> dict[str, Any]:
    """Return the ops (inputs, attributes, tolerances) and the implementations as JSON."""
    return {
        "ops": [
            {
                "name": op.name,
                "inputs": {port.name: port.axes for port in op.inputs},
                "outputs": {port.name: port.axes for port in op.outputs},
                "attributes": {
                    attribute.name: {"default": attribute.default, "allowed": attribute.allowed}
                    for attribute in op.attributes.values()
                },
                "tolerance": dict(op.tolerance),
            }
            for op in OPS.values()
        ],
        "implementations": [asdict(implementation) for implementation in implementations()],
    }


def _package(name: str, package: str, extra: str) -> Implementation:
    try:
        return Implementation(name, True, f"{package} {version(package)}")
    except PackageNotFoundError:
        return Implementation(name, False, f"{package} is not installed: {install(extra)}")


def _kernels() -> Implementation:
    from saccade.plugins.native import bindings, library

    name = "native kernels (CPU)"
    try:
        path = library.built_library()
        kernels = bindings.kernels() if path else None
    except SaccadeError as error:
        return Implementation(name, False, str(error))
    if kernels is None:
        return Implementation(name, False, "not built yet: saccade ops --build")
    return Implementation(name, True, f"{kernels.target()}, {path}")


def _torch(library: Implementation) -> Implementation:
    package = _package("torch operator", "torch", "export")
    if not package.available:
        return package
    forms = "native kernels on the CPU" if library.available else "vectorized torch form"
    return Implementation(package.name, True, f"{package.detail}, {forms}")


def _onnxruntime(library: Implementation) -> Implementation:
    name = "ONNX Runtime kernel"
    packages = [_package(name, each, "cpu") for each in ("onnxruntime", "onnxruntime-gpu")]
    installed = next((package for package in packages if package.available), None)
    if installed is None:
        return packages[0]
    return installed if library.available else Implementation(name, False, library.detail)


def _tensorrt() -> Implementation:
    name = "TensorRT plugin (CUDA)"
    if TENSORRT_LIBRARY.exists():
        return Implementation(name, True, str(TENSORRT_LIBRARY))
    return Implementation(
        name,
        False,
        "not built: make plugins-tensorrt TENSORRT_INCLUDE_DIR=... in a source tree "
        "(needs nvcc and TensorRT's headers); without it, TensorRT uses the function bodies",
    )
