# SPDX-License-Identifier: Apache-2.0
"""How a runtime executes custom ops: by kernels of the op library, or by their function bodies."""

from typing import Literal, get_args

_Execution = Literal["kernels", "bodies"]
Ops = _Execution | None  # none: the file has no custom op
OPS: tuple[str, ...] = get_args(_Execution)
