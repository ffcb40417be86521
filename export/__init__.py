# SPDX-License-Identifier: Apache-2.0
"""Checkpoint to ONNX, and the proof that both agree; called, the package is the verb itself."""

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from saccade.export.exported import ExportedModel, ExportOptions
    from saccade.models.checkpoint import Checkpoint


class _Verb(ModuleType):
    """`saccade.export` names this package and a public function: importing binds the package."""

    def __call__(
        self, checkpoint: Union["Checkpoint", Path, str], options: "ExportOptions"
    ) -> "ExportedModel":
        from saccade.export.exported import export

        return export(checkpoint, options)


sys.modules[__name__].__class__ = _Verb
