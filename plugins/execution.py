# SPDX-License-Identifier: Apache-2.0
"""How a runtime executes custom ops: with kernels of the op library or as function bodies."""

from typing import Literal, get_args

_Execution = Literal["kernels", "bodies"]
Ops = _Execution | None  # None: the file has no custom op
OPS: tuple[str, ...] = get_args(_Execution)
