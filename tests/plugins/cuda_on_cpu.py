# SPDX-License-Identifier: Apache-2.0
"""Run the CUDA kernels on the CPU, through their C interface, on arrays."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from places import PACKAGE, ROOT

from saccade.plugins.contract import Op

NATIVE, HERE = PACKAGE / "plugins" / "native", ROOT / "tests" / "plugins" / "native"
DTYPES = {"float32": 1, "float16": 10}


def built(folder: Path) -> Path:
    """Compile the kernels for the CPU; nvcc knows where CUDA's headers are."""
    library = folder / "libcuda_on_cpu.so"
    stand_in = f"-Xcompiler=-include,{HERE / 'cuda_on_cpu.hpp'}"
    options = "-std=c++17 -O2 -x c++ -shared -cudart none -Xcompiler=-fPIC,-fvisibility=hidden,-w"
    sources = [str(NATIVE / "cuda_ops.cu"), str(HERE / "cuda_on_cpu.cpp")]
    subprocess.run(
        ["nvcc", *options.split(), stand_in, *sources, "-o", str(library)],
        check=True,
        capture_output=True,
        text=True,
    )
    return library


class CudaOnCpu:
    """Runs an op by its CUDA kernel; `descending` reverses the order of threads."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def __call__(
        self,
        op: Op,
        arrays: tuple[np.ndarray, ...],
        given: dict[str, Any],
        *,
        shared_bytes: int = 63 * 1024,
        descending: bool = False,
    ) -> tuple[np.ndarray, ...]:
        ctypes.c_int.in_dll(self.library, "cuda_on_cpu_shared_bytes").value = shared_bytes
        ctypes.c_int.in_dll(self.library, "cuda_on_cpu_descending").value = int(descending)
        x, *others = (np.ascontiguousarray(array) for array in arrays)
        outputs = unwritten(op, [x, *others])
        name = op.reference.__name__.removeprefix("masked_")
        rank = 1 if name == "sparsemax" else 2
        counted = [ctypes.c_int64(int(np.prod(x.shape[:-rank])))]
        counted += [ctypes.c_int64(axis) for axis in x.shape[x.ndim - rank :]]
        size = getattr(self.library, f"saccade_cuda_{name}_workspace_bytes")
        size.restype = ctypes.c_size_t
        workspace = np.zeros(size(*counted) // 8 + 2)
        sizes = [None] if name == "tvmax" and not others else []
        numbers = [
            ctypes.c_int64(default) if isinstance(default, int) else ctypes.c_float(default)
            for default in op.defaults(given).values()
        ]
        run = getattr(self.library, f"saccade_cuda_{name}")
        status = run(
            ctypes.c_int(DTYPES[x.dtype.name]),
            *map(pointer, (x, *others)),
            *sizes,
            *map(pointer, outputs),
            *counted,
            *numbers,
            pointer(workspace),
            None,
        )
        assert status == 0
        return outputs


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def unwritten(op: Op, inputs: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return outputs filled with 7, which shows what a kernel does not write."""
    shapes = op.output_shapes(*(value.shape for value in inputs))
    types = [inputs[0].dtype if port.dtype == "T" else port.dtype for port in op.outputs]
    return tuple(np.full(shape, 7, dtype) for shape, dtype in zip(shapes, types, strict=True))
