# SPDX-License-Identifier: Apache-2.0
"""Execution of custom ops by a runtime: by kernels of the op library, or by function bodies."""

from typing import Literal, get_args

_Execution = Literal["kernels", "bodies"]
Ops = _Execution | None  # none: the file has no custom op
OPS: tuple[str, ...] = get_args(_Execution)
