# SPDX-License-Identifier: Apache-2.0
"""The GPU at hand, asked of its driver: name, compute capability, driver version."""

import ctypes
from dataclasses import dataclass

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_TEXT_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """The first device that the driver lists."""

    name: str
    capability: str  # such as 8.9
    driver: str


def gpu_at_hand() -> Gpu | None:
    """The GPU, or none where there is no driver or no device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    asked = (
        cuda.cuDeviceGetName(name, _TEXT_BYTES, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(asked):
        return None
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}", _driver(cuda))


def _driver(cuda: ctypes.CDLL) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
        asked = management.nvmlInit_v2() or management.nvmlSystemGetDriverVersion(text, _TEXT_BYTES)
    except OSError:
        asked = True
    if not asked:
        return text.value.decode()
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
