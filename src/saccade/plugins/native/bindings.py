# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels as Python functions of addresses and numbers: ctypes over the C interface."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.plugins.contract import Op
from saccade.plugins.native import library
from saccade.plugins.sparsemax.contract import sparsemax
from saccade.plugins.svpn.contract import svpn
from saccade.plugins.svpn_fast.contract import svpn_fast
from saccade.plugins.tvmax.contract import masked_tvmax

# SACCADE_INTERFACE of saccade_ops.h.
INTERFACE = 1
# Element types with ONNX's numbers.
CODES = {"float32": 1, "float16": 10, "float64": 11}
# A second thread pays for itself from here: about 0.3 ms of sparsemax.
_ELEMENTS_A_THREAD = 1 << 19
# Kernels may hold up to this many items side by side in vector lanes.
_LANES = 16
# Where no library stood, another look is taken after this long: it may be built by then.
_LOOK_AGAIN_S = 1.0

_NUMBER, _WHOLE, _ADDRESS = ctypes.c_double, ctypes.c_int64, ctypes.c_void_p


def _signature(op: Op, *, more: int = 0) -> tuple[int, list[Any]]:
    """Signature of a function: number of addresses; count of items, axes of one, and attributes."""
    axes = len(op.inputs[0].axes.split()) - 1
    kinds = [_NUMBER if attribute.kind is float else _WHOLE for attribute in op.attributes.values()]
    return len(op.inputs) + len(op.outputs) + more, [_WHOLE] * (1 + axes) + kinds


# By function of saccade_ops.h.
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
    """Every kernel of one library.

    Items are split into ranges for at most `threads` threads; an answer does not depend on it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        version = self._library.saccade_interface()
        if version != INTERFACE:
            raise SaccadeError(
                f"{path}: its interface is {version}, expected {INTERFACE}. "
                "It belongs to another version of saccade: install saccade again."
            )
        self._library.saccade_status.restype = ctypes.c_char_p
        self._library.saccade_target.restype = ctypes.c_char_p
        self._library.saccade_choose_target.argtypes = [ctypes.c_char_p]
        self._functions = {name: self._function(name) for name in _SIGNATURES}

    def _function(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, f"saccade_{name}")
        addresses, numbers = _SIGNATURES[name]
        # No pool: the ranges are split here, and ctypes lets go of the interpreter's lock.
        function.argtypes = [ctypes.c_int, *[_ADDRESS] * addresses, *numbers, _ADDRESS]
        return function

    def target(self) -> str:
        """The instruction set in use."""
        return str(self._library.saccade_target().decode())

    def choose_target(self, name: str | None) -> bool:
        """Use another instruction set, None for the best; False if this CPU lacks it."""
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
        """The function of saccade_ops.h of that name, with its buffers in their order.

        `tensors` are dense, of torch, None for one that is left out; each holds `count` items, one
        after the other, but for those that `shared` numbers; `code` is their type's. `numbers` are
        an item's axes and the attributes, `work` is what an item costs, in elements of sparsemax.
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
    """The library once it was found, and when it was last looked for."""

    kernels: Kernels | None = None
    looked_at: float = float("-inf")


def kernels() -> Kernels | None:
    """The kernels of the library that stands already; None where there is none."""
    if not _switched_on.get():
        return None
    if _Held.kernels is None and time.monotonic() - _Held.looked_at > _LOOK_AGAIN_S:
        path = library.built_library()
        _Held.kernels = Kernels(path) if path else None
        _Held.looked_at = time.monotonic()
    return _Held.kernels


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, and in this thread, no kernel is found: for tests of the form without them."""
    token = _switched_on.set(False)
    try:
        yield
    finally:
        _switched_on.reset(token)
