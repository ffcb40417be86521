# SPDX-License-Identifier: Apache-2.0
"""saccade turns a checkpoint of an attention-structured vision model into a served one.

Every command is also a function with the same name: `saccade export` is `saccade.export(path,
saccade.ExportOptions(...))`. The exception is `saccade models`, which is `list_models`, because
`models` is a package. Public names are imported on first use, so that `import saccade` needs only
the standard library, and a client does not load torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# ONNX Runtime sends telemetry about sessions to its maker, from 1.29 on Linux too, unless this is
# set before it is imported. Set it to 0 to allow the telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from saccade.core.errors import SaccadeError as SaccadeError
    from saccade.core.progress import Step as Step
    from saccade.exporter.evaluation.calibrate import calibrate as calibrate
    from saccade.exporter.evaluation.evaluate import evaluate as evaluate
    from saccade.exporter.evaluation.options import EvaluateOptions as EvaluateOptions
    from saccade.exporter.exported import ExportOptions as ExportOptions
    from saccade.exporter.exported import export as export
    from saccade.exporter.gate.bisect import bisect as bisect
    from saccade.exporter.gate.gate import verify as verify
    from saccade.exporter.policy.options import CalibrateOptions as CalibrateOptions
    from saccade.exporter.runtimes.build import build as build
    from saccade.exporter.runtimes.options import BuildOptions as BuildOptions
    from saccade.models.catalogue import catalogue as list_models  # noqa: F401
    from saccade.models.checkpoint import Checkpoint as Checkpoint
    from saccade.models.checkpoint import load as load
    from saccade.models.hub import DownloadOptions as DownloadOptions
    from saccade.models.hub import UploadOptions as UploadOptions
    from saccade.models.hub import download as download
    from saccade.models.hub import upload as upload
    from saccade.models.official.convert import ConvertOptions as ConvertOptions
    from saccade.models.official.convert import convert as convert
    from saccade.models.sparo.select import SelectOptions as SelectOptions
    from saccade.models.sparo.select import select as select
    from saccade.models.training.options import TrainOptions as TrainOptions
    from saccade.models.training.train import train as train
    from saccade.serving.bench.bench import bench as bench
    from saccade.serving.bench.options import BenchOptions as BenchOptions
    from saccade.serving.bench.plan import PlanOptions as PlanOptions
    from saccade.serving.bench.plan import plan as plan
    from saccade.serving.bench.sweep.choice import ChooseOptions as ChooseOptions
    from saccade.serving.bench.sweep.choice import choose as choose
    from saccade.serving.bench.sweep.options import SweepOptions as SweepOptions
    from saccade.serving.bench.sweep.sweep import sweep as sweep
    from saccade.serving.bulk.bulk import bulk as bulk
    from saccade.serving.bulk.options import BulkOptions as BulkOptions
    from saccade.serving.client.async_client import AsyncClient as AsyncClient
    from saccade.serving.client.call_options import AnswerOptions as AnswerOptions
    from saccade.serving.client.call_options import CaptionOptions as CaptionOptions
    from saccade.serving.client.call_options import ClassifyOptions as ClassifyOptions
    from saccade.serving.client.call_options import EditOptions as EditOptions
    from saccade.serving.client.call_options import EmbedOptions as EmbedOptions
    from saccade.serving.client.call_options import SegmentOptions as SegmentOptions
    from saccade.serving.client.call_options import ShowOptions as ShowOptions
    from saccade.serving.client.client import Client as Client
    from saccade.serving.commands.artefacts import ops as ops
    from saccade.serving.commands.calls import answer as answer
    from saccade.serving.commands.calls import caption as caption
    from saccade.serving.commands.calls import classify as classify
    from saccade.serving.commands.calls import edit as edit
    from saccade.serving.commands.calls import embed as embed
    from saccade.serving.commands.calls import segment as segment
    from saccade.serving.commands.calls import show as show
    from saccade.serving.commands.demo import DemoOptions as DemoOptions
    from saccade.serving.commands.demo import demo as demo
    from saccade.serving.commands.doctor import doctor as doctor
    from saccade.serving.commands.explore.explore import ExploreOptions as ExploreOptions
    from saccade.serving.commands.explore.explore import explore as explore
    from saccade.serving.commands.inspection import inspect as inspect
    from saccade.serving.commands.predict import PredictOptions as PredictOptions
    from saccade.serving.commands.predict import predict as predict
    from saccade.serving.local.artefact import LoadedArtefact as LoadedArtefact
    from saccade.serving.local.artefact import load_artefact as load_artefact
    from saccade.serving.repository.deploy import deploy as deploy
    from saccade.serving.repository.deploy import deploy as repository  # noqa: F401
    from saccade.serving.repository.options import RepositoryOptions as RepositoryOptions
    from saccade.serving.repository.preflight.verb import PreflightOptions as PreflightOptions
    from saccade.serving.repository.preflight.verb import preflight as preflight
    from saccade.serving.server.envoy import ProxyOptions as ProxyOptions
    from saccade.serving.server.envoy import proxy as proxy
    from saccade.serving.server.foreground import serve as serve
    from saccade.serving.server.server import ServeOptions as ServeOptions
    from saccade.serving.server.server import Server as Server

__version__ = "0.1.0"

_HOME = {
    "AnswerOptions": "saccade.serving.client.call_options",
    "AsyncClient": "saccade.serving.client.async_client",
    "BenchOptions": "saccade.serving.bench.options",
    "BuildOptions": "saccade.exporter.runtimes.options",
    "BulkOptions": "saccade.serving.bulk.options",
    "CalibrateOptions": "saccade.exporter.policy.options",
    "CaptionOptions": "saccade.serving.client.call_options",
    "Checkpoint": "saccade.models.checkpoint",
    "ChooseOptions": "saccade.serving.bench.sweep.choice",
    "ClassifyOptions": "saccade.serving.client.call_options",
    "Client": "saccade.serving.client.client",
    "ConvertOptions": "saccade.models.official.convert",
    "DemoOptions": "saccade.serving.commands.demo",
    "DownloadOptions": "saccade.models.hub",
    "EditOptions": "saccade.serving.client.call_options",
    "EmbedOptions": "saccade.serving.client.call_options",
    "EvaluateOptions": "saccade.exporter.evaluation.options",
    "ExploreOptions": "saccade.serving.commands.explore.explore",
    "ExportOptions": "saccade.exporter.exported",
    "LoadedArtefact": "saccade.serving.local.artefact",
    "PlanOptions": "saccade.serving.bench.plan",
    "PredictOptions": "saccade.serving.commands.predict",
    "PreflightOptions": "saccade.serving.repository.preflight.verb",
    "ProxyOptions": "saccade.serving.server.envoy",
    "RepositoryOptions": "saccade.serving.repository.options",
    "SaccadeError": "saccade.core.errors",
    "SegmentOptions": "saccade.serving.client.call_options",
    "SelectOptions": "saccade.models.sparo.select",
    "ServeOptions": "saccade.serving.server.server",
    "Server": "saccade.serving.server.server",
    "ShowOptions": "saccade.serving.client.call_options",
    "Step": "saccade.core.progress",
    "SweepOptions": "saccade.serving.bench.sweep.options",
    "TrainOptions": "saccade.models.training.options",
    "UploadOptions": "saccade.models.hub",
    "answer": "saccade.serving.commands.calls",
    "bench": "saccade.serving.bench.bench",
    "bisect": "saccade.exporter.gate.bisect",
    "build": "saccade.exporter.runtimes.build",
    "bulk": "saccade.serving.bulk.bulk",
    "calibrate": "saccade.exporter.evaluation.calibrate",
    "caption": "saccade.serving.commands.calls",
    "choose": "saccade.serving.bench.sweep.choice",
    "classify": "saccade.serving.commands.calls",
    "convert": "saccade.models.official.convert",
    "demo": "saccade.serving.commands.demo",
    "deploy": "saccade.serving.repository.deploy",
    "doctor": "saccade.serving.commands.doctor",
    "download": "saccade.models.hub",
    "edit": "saccade.serving.commands.calls",
    "embed": "saccade.serving.commands.calls",
    "evaluate": "saccade.exporter.evaluation.evaluate",
    "explore": "saccade.serving.commands.explore.explore",
    "export": "saccade.exporter.exported",
    "inspect": "saccade.serving.commands.inspection",
    "list_models": "saccade.models.catalogue:catalogue",
    "load": "saccade.models.checkpoint",
    "load_artefact": "saccade.serving.local.artefact",
    "ops": "saccade.serving.commands.artefacts",
    "plan": "saccade.serving.bench.plan",
    "predict": "saccade.serving.commands.predict",
    "preflight": "saccade.serving.repository.preflight.verb",
    "proxy": "saccade.serving.server.envoy",
    "repository": "saccade.serving.repository.deploy:deploy",
    "segment": "saccade.serving.commands.calls",
    "select": "saccade.models.sparo.select",
    "serve": "saccade.serving.server.foreground",
    "show": "saccade.serving.commands.calls",
    "sweep": "saccade.serving.bench.sweep.sweep",
    "train": "saccade.models.training.train",
    "upload": "saccade.models.hub",
    "verify": "saccade.exporter.gate.gate",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    module, _, other = _HOME[name].partition(":")
    return getattr(import_module(module), other or name)


def __dir__() -> list[str]:
    return __all__
