# SPDX-License-Identifier: Apache-2.0
"""saccade: checkpoints of attention-structured vision models to a served model.

The public names are imported when first used, so that `import saccade` needs nothing
but the standard library and a client never pays for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# ONNX Runtime reports sessions to its maker over the network, from 1.29 on also on Linux, unless
# this stands before it is imported. Whoever wants that sets 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from saccade.export.engines.build import BuildOptions as BuildOptions
    from saccade.export.engines.build import build as build
    from saccade.export.exported import ExportOptions as ExportOptions
    from saccade.export.exported import export as export
    from saccade.export.gate import verify as verify
    from saccade.models.checkpoint import Checkpoint as Checkpoint
    from saccade.models.checkpoint import load as load
    from saccade.plugins.errors import SaccadeError as SaccadeError
    from saccade.serving.client import AsyncClient as AsyncClient
    from saccade.serving.client import Client as Client
    from saccade.serving.repository import RepositoryOptions as RepositoryOptions
    from saccade.serving.repository import deploy as deploy
    from saccade.serving.server import ServeOptions as ServeOptions
    from saccade.serving.server import Server as Server

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "saccade.serving.client",
    "BuildOptions": "saccade.export.engines.build",
    "Checkpoint": "saccade.models.checkpoint",
    "Client": "saccade.serving.client",
    "ExportOptions": "saccade.export.exported",
    "RepositoryOptions": "saccade.serving.repository",
    "SaccadeError": "saccade.plugins.errors",
    "ServeOptions": "saccade.serving.server",
    "Server": "saccade.serving.server",
    "build": "saccade.export.engines.build",
    "deploy": "saccade.serving.repository",
    "export": "saccade.export.exported",
    "load": "saccade.models.checkpoint",
    "verify": "saccade.export.gate",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
