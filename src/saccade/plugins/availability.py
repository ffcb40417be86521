# SPDX-License-Identifier: Apache-2.0
"""Implementations of the ops that can run here, and why the others cannot."""

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, install
from saccade.plugins.ops import OPS

TENSORRT_LIBRARY = Path(__file__).parent / "native" / "lib" / "libsaccade_tensorrt.so"


@dataclass(frozen=True)
class Implementation:
    """One way to run all five ops."""

    name: str
    available: bool
    detail: str  # version or path where it is, the reason and what to do where it is not


def implementations() -> tuple[Implementation, ...]:
    """Looks without building, without starting anything, and without importing a framework."""
    library = _kernels()
    return (
        Implementation("NumPy reference", True, "float64; what the others are held to"),
        _torch(library),
        _package("ONNX function body", "onnx", "export"),
        _onnxruntime(library),
        library,
        _tensorrt(),
    )


def describe() -> dict[str, Any]:
    """Ops with their inputs, attributes and tolerances, and the implementations, as JSON."""
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
    forms = "native kernels on the CPU" if library.available else "vectorised torch form"
    return Implementation(package.name, True, f"{package.detail}, {forms}")


def _onnxruntime(library: Implementation) -> Implementation:
    name = "ONNX Runtime kernel"
    for package in ("onnxruntime", "onnxruntime-gpu"):
        installed = _package(name, package, "cpu")
        if installed.available:
            return installed if library.available else Implementation(name, False, library.detail)
    return installed


def _tensorrt() -> Implementation:
    name = "TensorRT plugin (CUDA)"
    if TENSORRT_LIBRARY.exists():
        return Implementation(name, True, str(TENSORRT_LIBRARY))
    return Implementation(
        name,
        False,
        "not built: make plugins-tensorrt TENSORRT_INCLUDE_DIR=... in a source tree "
        "(needs nvcc and TensorRT's headers); without it TensorRT takes the function body",
    )
