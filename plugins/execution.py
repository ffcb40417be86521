# SPDX-License-Identifier: Apache-2.0
"""How a runtime executes custom ops: by kernels of the op library, or by their function bodies."""

from typing import Literal

Ops = Literal["kernels", "bodies"] | None  # none: the file has no custom op
OPS = ("kernels", "bodies")
