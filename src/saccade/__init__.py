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
    from saccade.errors import SaccadeError as SaccadeError
    from saccade.exporter.exported import ExportOptions as ExportOptions
    from saccade.exporter.exported import export as export
    from saccade.exporter.gate.gate import verify as verify
    from saccade.exporter.runtimes.build import build as build
    from saccade.exporter.runtimes.options import BuildOptions as BuildOptions
    from saccade.models.checkpoint import Checkpoint as Checkpoint
    from saccade.models.checkpoint import load as load
    from saccade.serving.bulk.bulk import bulk as bulk
    from saccade.serving.bulk.options import BulkOptions as BulkOptions
    from saccade.serving.client.async_client import AsyncClient as AsyncClient
    from saccade.serving.client.client import Client as Client
    from saccade.serving.repository.deploy import deploy as deploy
    from saccade.serving.repository.options import RepositoryOptions as RepositoryOptions
    from saccade.serving.server.envoy import ProxyOptions as ProxyOptions
    from saccade.serving.server.envoy import proxy as proxy
    from saccade.serving.server.server import ServeOptions as ServeOptions
    from saccade.serving.server.server import Server as Server

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "saccade.serving.client.async_client",
    "BulkOptions": "saccade.serving.bulk.options",
    "BuildOptions": "saccade.exporter.runtimes.options",
    "Checkpoint": "saccade.models.checkpoint",
    "Client": "saccade.serving.client.client",
    "ExportOptions": "saccade.exporter.exported",
    "ProxyOptions": "saccade.serving.server.envoy",
    "RepositoryOptions": "saccade.serving.repository.options",
    "SaccadeError": "saccade.errors",
    "ServeOptions": "saccade.serving.server.server",
    "Server": "saccade.serving.server.server",
    "bulk": "saccade.serving.bulk.bulk",
    "build": "saccade.exporter.runtimes.build",
    "deploy": "saccade.serving.repository.deploy",
    "export": "saccade.exporter.exported",
    "load": "saccade.models.checkpoint",
    "proxy": "saccade.serving.server.envoy",
    "verify": "saccade.exporter.gate.gate",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
