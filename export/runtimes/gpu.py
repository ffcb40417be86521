# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as reported by the driver."""

import ctypes
import os
from dataclasses import dataclass

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_TEXT_BYTES = 256
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    capability: str  # such as 8.9
    driver: str
    memory_bytes: int


def gpu_at_hand() -> Gpu | None:
    """Return the first GPU, which saccade itself uses, or None."""
    return next(iter(gpus()), None)


def visible_alone() -> tuple[str, ...]:
    """Return, for each of `gpus`, the CUDA_VISIBLE_DEVICES with which a process sees only it."""
    count, listed = len(gpus()), os.environ.get(VISIBLE)
    # Indices count the visible devices, but CUDA_VISIBLE_DEVICES of a child process counts all.
    every = [name.strip() for name in listed.split(",")] if listed is not None else range(count)
    return tuple(map(str, every))[:count]


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in the driver's order, except those that CUDA_VISIBLE_DEVICES hides.

    Empty if there is no driver or the driver fails.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    driver = _driver(cuda)
    gpus_here = (_gpu(cuda, index, driver) for index in range(count.value))
    return tuple(value for value in gpus_here if value is not None)


def _gpu(cuda: ctypes.CDLL, index: int, driver: str) -> Gpu | None:
    device = ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    failed = (
        cuda.cuDeviceGetName(name, _TEXT_BYTES, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
    )
    if any(failed):
        return None
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}", driver, memory.value)


def _driver(cuda: ctypes.CDLL) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
        failed = management.nvmlInit_v2() or management.nvmlSystemGetDriverVersion(
            text, _TEXT_BYTES
        )
    except OSError:
        failed = True
    if not failed:
        return text.value.decode()
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
