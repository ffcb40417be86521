# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels as Python functions on addresses: ctypes over the C interface."""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from saccade.plugins.errors import SaccadeError
from saccade.plugins.native import library

# SACCADE_INTERFACE of saccade_ops.h, whose signatures stand below.
INTERFACE = 1
# Element types, with ONNX's numbers.
CODES = {"float32": 1, "float16": 10, "float64": 11}
_BAD_SIZES = 4
# A thread is worth starting for this many elements' work of the cheapest op (about 0.3 ms).
_ELEMENTS_A_THREAD = 1 << 19
# Where the library was not there, another look is taken after this long: it may be built by then.
_LOOK_AGAIN_S = 1.0

_NUMBER, _WHOLE, _ADDRESS = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "sparsemax": [_ADDRESS] * 2 + [_WHOLE] * 2,
    "sparsemax_backward": [_ADDRESS] * 3 + [_WHOLE] * 2,
    "tvmax": [_ADDRESS] * 5 + [_WHOLE] * 3 + [_NUMBER] * 2 + [_WHOLE],
    "tvmax_backward": [_ADDRESS] * 4 + [_WHOLE] * 2,
    "svpn": [_ADDRESS] * 2 + [_WHOLE] * 3 + [_NUMBER],
    "svpn_fast": [_ADDRESS] * 3 + [_WHOLE] * 3 + [_NUMBER] + [_WHOLE] * 2 + [_NUMBER],
}


class Kernels:
    """Every kernel of one library; arguments are addresses and numbers as in saccade_ops.h.

    Each call takes the number of threads it may use last; an answer does not depend on it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        found = self._functions.saccade_interface()
        if found != INTERFACE:
            raise SaccadeError(
                f"{path}: its interface is {found}, expected {INTERFACE}. "
                "It is of another version: install saccade again."
            )
        self._functions.saccade_status.restype = ctypes.c_char_p
        self._functions.saccade_target.restype = ctypes.c_char_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._functions, f"saccade_{name}")
            # The element type first, the pool last: ranges of items are split here instead.
            function.argtypes = [ctypes.c_int, *arguments, _ADDRESS]
        self._sparsemax = self._functions.saccade_sparsemax
        self._sparsemax_backward = self._functions.saccade_sparsemax_backward

    @property
    def target(self) -> str:
        """The instruction set in use."""
        return str(self._functions.saccade_target().decode())

    def sparsemax(self, code: int, z: int, p: int, rows: int, n: int, threads: int) -> None:
        size = n * _size(code)
        self._in_ranges(
            rows,
            rows * n,
            threads,
            lambda at, count: self._sparsemax(
                code, z + at * size, p + at * size, count, n, None
            ),
        )
