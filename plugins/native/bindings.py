# SPDX-License-Identifier: Apache-2.0
"""Call the CPU kernels from Python, with addresses and numbers, through ctypes."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.plugins.contract import Op
from saccade.plugins.native import library
from saccade.plugins.sparsemax.contract import sparsemax
from saccade.plugins.svpn.contract import svpn
from saccade.plugins.svpn_fast.contract import svpn_fast
from saccade.plugins.tvmax.contract import masked_tvmax

# SACCADE_INTERFACE of saccade_ops.h.
INTERFACE = 1
# Element types, numbered as in ONNX.
CODES = {"float32": 1, "float16": 10, "float64": 11}
# From this much work on, a second thread pays off: about 0.3 ms of sparsemax.
_ELEMENTS_A_THREAD = 1 << 19
# Kernels may process up to this many items side by side in vector lanes.
_LANES = 16
# If no library was found, look again after this many seconds: it may have been built.
_LOOK_AGAIN_S = 1.0

_NUMBER, _WHOLE, _ADDRESS = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p


def _signature(op: Op, *, more: int = 0) -> tuple[int, list[Any]]:
    """Return a signature: number of addresses; count of items, axes of an item, attributes."""
    axes = len(op.inputs[0].axes.split()) - 1
    kinds = [_NUMBER if attribute.kind is float else _WHOLE for attribute in op.attributes.values()]
    return len(op.inputs) + len(op.outputs) + more, [_WHOLE] * (1 + axes) + kinds


# By function name in saccade_ops.h.
_SIGNATURES = {
    "sparsemax": _signature(sparsemax),
    "sparsemax_backward": _signature(sparsemax, more=1),
    "tvmax": _signature(masked_tvmax, more=1),
    "tvmax_backward": (4, [_WHOLE] * 2),
    "svpn": _signature(svpn),
    "svpn_fast": _signature(svpn_fast),
}

_switched_on: ContextVar[bool] = ContextVar("kernels", default=True)


class Kernels:
    """The kernels of one library.

    Items are split into ranges for at most `threads` threads; the answers do not depend on this.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        version = self._library.saccade_interface()
        if version != INTERFACE:
            raise SaccadeError(
                f"{path}: has interface version {version}, expected {INTERFACE}. "
                "It belongs to another version of saccade. Install saccade again."
            )
        self._library.saccade_status.restype = ctypes.c_char_p
        self._library.saccade_target.restype = ctypes.c_char_p
        self._library.saccade_choose_target.argtypes = [ctypes.c_char_p]
        self._functions = {name: self._function(name) for name in _SIGNATURES}

    def _function(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, f"saccade_{name}")
        addresses, numbers = _SIGNATURES[name]
        # No thread pool: the ranges are split here, and ctypes releases the GIL.
        function.argtypes = [ctypes.c_int, *[_ADDRESS] * addresses, *numbers, _ADDRESS]
        return function

    def target(self) -> str:
        """Return the instruction set in use."""
        return str(self._library.saccade_target().decode())

    def choose_target(self, name: str | None) -> bool:
        """Use another instruction set (None: the best one); return False if this CPU lacks it."""
        chosen = None if name is None else name.encode()
        return bool(self._library.saccade_choose_target(chosen) == 0)

    def run(
        self,
        name: str,
        code: int,
        tensors: Sequence[Any],
        count: int,
        numbers: Sequence[float],
        *,
        work: int,
        threads: int = 1,
        shared: Sequence[int] = (),
    ) -> None:
        """Call the function `name` of saccade_ops.h, with its buffers in order.

        `tensors` are dense torch tensors, or None for an omitted one. Each has `count` items in a
        row, except those with an index in `shared`. `code` is the number of their type. `numbers`
        are the axes of an item and the attributes. `work` is the cost of an item, in elements of
        sparsemax.
        """
        function = self._functions[name]
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        whole = count * work
        if threads == 1 or whole < 2 * _ELEMENTS_A_THREAD or count < 2 * _LANES:
            status = function(code, *addresses, count, *numbers, None)
            if status:
                self._check(name, status)
            return
        parts = min(threads, whole // _ELEMENTS_A_THREAD, count // _LANES)
        step = -(-count // (parts * _LANES)) * _LANES
        strides = [
            0 if tensor is None or i in shared else tensor.numel() // count * tensor.element_size()
            for i, tensor in enumerate(tensors)
        ]

        def one(first: int) -> int:
            moved = [
                None if at is None else at + first * stride
                for at, stride in zip(addresses, strides, strict=True)
            ]
            return function(code, *moved, min(step, count - first), *numbers, None)

        starts = range(0, count, step)
        with ThreadPoolExecutor(len(starts)) as pool:
            for status in pool.map(one, starts):
                self._check(name, status)

    def _check(self, name: str, status: int) -> None:
        if status:
            words = self._library.saccade_status(status).decode()
            raise SaccadeError(f"saccade_{name}: {words}.")


class _Held:
    """The library if it was found, and the time of the last search."""

    kernels: Kernels | None = None
    looked_at: float = float("-inf")


def kernels() -> Kernels | None:
    """Return the kernels of the library, or None if it is not built."""
    if not _switched_on.get():
        return None
    if _Held.kernels is None and time.monotonic() - _Held.looked_at > _LOOK_AGAIN_S:
        path = library.built_library()
        _Held.kernels = Kernels(path) if path else None
        _Held.looked_at = time.monotonic()
    return _Held.kernels


@contextmanager
def without_kernels() -> Iterator[None]:
    """Hide the kernels in this thread, to test the implementation without them."""
    token = _switched_on.set(False)
    try:
        yield
    finally:
        _switched_on.reset(token)
