# SPDX-License-Identifier: Apache-2.0
"""What each command of the line takes and answers; the verbs themselves live in their layers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from saccade.export.exported import ExportOptions
from saccade.models.training.options import TrainOptions
from saccade.plugins.errors import SaccadeError
from saccade.serving.bench import BenchOptions
from saccade.serving.demo import DemoOptions
from saccade.serving.repository import RepositoryOptions
from saccade.serving.server import ServeOptions

# The fields of an options dataclass appear as flags of the command itself.
_flat = tyro.conf.arg(name="")


@dataclass(frozen=True)
class Answer:
    """What a command found: for a machine, for a reader, and as an exit code."""

    data: Any
    text: Any = None
    as_json: bool = False
    exit_code: int = 0


@dataclass(frozen=True)
class CallOptions:
    """How an image is sent to a running server."""

    model: str  # name of the router in the repository
    budget: float | None = None  # the largest variant with at most this share of the modules
    url: str = "127.0.0.1:8001"  # the server's gRPC address
    timeout_s: float = 10.0  # deadline of one request


@dataclass(frozen=True)
class ClassifyOptions(CallOptions):
    """What the answer has to satisfy: at most one of --budget, --min-score, --max-latency-ms."""

    min_score: float | None = None  # the fastest variant surely at least this good
    max_latency_ms: float | None = None  # the best variant with a measured p95 within this
    top: int = 3  # labels an image


@dataclass(frozen=True)
class EmbedOptions(CallOptions):
    """Where the embeddings go."""

    out: Path = Path("embeddings.npz")  # vectors, file names, variant and its hash
    append: bool = False  # add to an existing file of the same variant
    force: bool = False  # replace what stands at --out


def train(
    family: Positional[Literal["nac", "sparo", "sot", "slot-attention", "vqa", "captioner"]],
    options: Annotated[TrainOptions, _flat],
    json: bool = False,
) -> Answer:
    """Train a model and write its checkpoint.

    Args:
        family: which model to train.
        json: machine-readable answer on standard output.
    """
    from saccade.models.train import train as verb

    checkpoint = verb(family, options)
    data = {"checkpoint": str(options.out), "sha256": checkpoint.sha256, "card": checkpoint.card}
    scores = checkpoint.card["validation"]
    by = "top-1 by budget" if family == "nac" else "scores"
    lines = [f"{options.out}: trained on {checkpoint.card['data']}, validation {by}:"]
    lines += [f"  {name:>12}  {float(score):.4f}" for name, score in scores.items()]
    return Answer(data, "\n".join(lines), json)


def export(
    checkpoint: Positional[Path],
    options: Annotated[ExportOptions, _flat],
    json: bool = False,
) -> Answer:
    """Export a checkpoint to ONNX at several budgets, each proved against the checkpoint.

    Args:
        checkpoint: a .safetensors file written by saccade.
        json: machine-readable answer on standard output.
    """
    from saccade.export.exported import export as verb
    from saccade.export.verdict import render

    exported = verb(checkpoint, options)
    return Answer(exported.to_dict(), render(exported.report), json)


def verify(folder: Positional[Path], json: bool = False) -> Answer:
    """Run the parity gate on every variant of a folder; exit 1 if any fails.

    Args:
        folder: what `saccade export` wrote.
        json: machine-readable answer on standard output.
    """
    from saccade.export.gate import verify as verb
    from saccade.export.verdict import render

    report = verb(folder)
    return Answer(report.to_dict(), render(report), json, exit_code=0 if report.passed else 1)


def bench(
    folder: Positional[Path],
    options: Annotated[BenchOptions, _flat],
    json: bool = False,
) -> Answer:
    """Measure score and throughput of each variant, in process and through a server.

    Args:
        folder: what `saccade export` wrote; frontier.json is written into it.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.bench import bench as verb
    from saccade.serving.report import render

    report = verb(folder, options)
    return Answer(report.to_dict(), render(report.to_dict()), json)


def repository(
    folder: Positional[Path],
    options: Annotated[RepositoryOptions, _flat],
    json: bool = False,
) -> Answer:
    """Write the model repository that a Triton server loads.

    Args:
        folder: what `saccade export` wrote, best after `saccade bench`.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.repository import deploy

    deployment = deploy(folder, options)
    text = (
        f"{deployment.folder}: model {deployment.model} with {len(deployment.variants)} variants "
        f"({', '.join(deployment.variants)}).\nServe it with: saccade serve {deployment.folder}"
    )
    return Answer(deployment.to_dict(), text, json)


def serve(
    repository: Positional[Path],
    options: Annotated[ServeOptions, _flat],
    json: bool = False,
) -> Answer:
    """Start the server in the foreground and watch over it; Ctrl-C stops it.

    Args:
        repository: what `saccade repository` wrote.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.server import serve as verb

    return Answer({"stopped": str(repository)}, None, json, exit_code=verb(repository, options))


def classify(
    image: Positional[tuple[Path, ...]],
    options: Annotated[ClassifyOptions, _flat],
    json: bool = False,
) -> Answer:
    """Classify images through a running server.

    Args:
        image: PNG, JPEG or WebP files.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.client import Client

    _some(image)
    with Client(options.url, options.model, timeout_s=options.timeout_s) as client:
        found = client.classify(
            image,
            budget=options.budget,
            min_score=options.min_score,
            max_latency_ms=options.max_latency_ms,
            top=options.top,
        )
    data = [{"image": str(path), **one.to_dict()} for path, one in zip(image, found, strict=True)]
    lines = [
        f"{path}: "
        + ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in one.labels)
        + f"  ({one.variant})"
        for path, one in zip(image, found, strict=True)
    ]
    return Answer(data, "\n".join(lines), json)


def embed(
    image: Positional[tuple[Path, ...]],
    options: Annotated[EmbedOptions, _flat],
    json: bool = False,
) -> Answer:
    """Embed images through a running server and store the vectors.

    Args:
        image: PNG, JPEG or WebP files.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.client import Client
    from saccade.serving.embeddings import check_embeddings_file, save_embeddings

    _some(image)
    check_embeddings_file(options.out, append=options.append, force=options.force)
    with Client(options.url, options.model, timeout_s=options.timeout_s) as client:
        found = client.embed(image, budget=options.budget)
    names = [str(path) for path in image]
    save_embeddings(options.out, found, names, append=options.append, force=options.force)
    count, width = found.vectors.shape
    data: dict[str, Any] = {"out": str(options.out), "images": count, "dimensions": width}
    data |= {"variant": found.variant, "sha256": found.sha256}
    return Answer(data, f"{options.out}: {count} x {width} from {found.variant}", json)


def demo(options: Annotated[DemoOptions, _flat], json: bool = False) -> Answer:
    """Run the whole path on real digits: train, export, verify, serve, classify, benchmark.

    Args:
        json: machine-readable answer on standard output.
    """
    from saccade.serving.demo import demo as verb

    report, text = verb(options)
    return Answer(report, text, json)


def ops(build: bool = False, json: bool = False) -> Answer:
    """The custom ops, their attributes, and which implementations can run here.

    Args:
        build: first build the library for ONNX Runtime and torch, if it is not built yet.
        json: machine-readable answer on standard output.
    """
    from saccade.plugins import onnxruntime_library
    from saccade.plugins.availability import describe
    from saccade.serving.ops_table import render

    if build:
        onnxruntime_library()
    found = describe()
    return Answer(found, render(found), json)


def doctor(url: str | None = None, json: bool = False) -> Answer:
    """What is installed, what is missing for which use, and how to get it.

    Args:
        url: also ask the server at this gRPC address whether every variant answers.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.doctor import doctor as verb
    from saccade.serving.doctor import render

    report = verb(url)
    return Answer(report.to_dict(), render(report), json, exit_code=report.exit_code)


def _some(images: tuple[Path, ...]) -> None:
    if not images:
        raise SaccadeError("No image given. Name one or more PNG, JPEG or WebP files.")
