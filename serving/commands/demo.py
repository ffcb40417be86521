# SPDX-License-Identifier: Apache-2.0
"""`saccade demo`: the whole workflow on real digits, with the verbs that a user calls."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import require
from saccade.core.files import new_folder, refuse_existing
from saccade.core.leftovers import temporary_folder
from saccade.core.options import Options
from saccade.core.verbosity import note
from saccade.exporter.export import ExportOptions
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.models.training.options import TrainOptions
from saccade.serving.bench.options import BenchOptions
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions

_NEEDED = {
    "export": ("torch", "onnx", "onnxscript"),
    "bench": ("sklearn.datasets", "matplotlib", "scipy.stats"),
}
SIZES = ("small", "middle", "large")  # of the shipped models of the group
RISK = 0.02  # of answers other than the large model's
_DATA = "signs"
_QUICK = BenchOptions(Path(), data=_DATA, limit=64, server=False, seconds=0.1, rounds=1)
_FULL = BenchOptions(Path(), data=_DATA, limit=2_000, seconds=60.0)


@dataclass(frozen=True)
class DemoOptions(Options):
    """Options of the demo."""

    out: Path = Path("build/demo")  # folder to write
    force: bool = False  # replace an existing folder


def demo(options: DemoOptions) -> tuple[dict[str, Any], Any]:
    """Train the small digits model and serve it; benchmark the group of shipped sign readers.

    The benchmark has a policy beside the single models if one is certified.

    Return the benchmark's report as plain values, and what to print of it.
    """
    from rich.console import Group

    from saccade.serving.bench.report import render

    refuse_existing(options.out, force=options.force)
    _check_installed()
    with new_folder(options.out, force=options.force) as folder:
        answers = _serve_digits(folder)
        report = _benchmark_group(folder)
    page = options.out / "report" / "report.html"
    return report, Group(render(report), "", *answers, "", f"report: {page}")


def _check_installed() -> None:
    """Check the needs of all four steps before the first one: the last starts minutes later.

    Raises: MissingPackage; SaccadeError if no server can run here.
    """
    from saccade.serving.repository.installation import check_installation, find_installation

    for extra, modules in _NEEDED.items():
        for module in modules:
            require(module, extra=extra)
    runtime_named(DEFAULT).require()
    check_installation(find_installation())


def _serve_digits(folder: Path) -> list[str]:
    from saccade.exporter.export import export
    from saccade.models.training.train import train
    from saccade.serving.client.client import Client
    from saccade.serving.repository.deploy import deploy
    from saccade.serving.server.server import Server

    note("1/5 train a Neural Attentive Circuit on scikit-learn's digits")
    train("nac", TrainOptions(data="digits", out=folder / "digits.safetensors"))
    note("2/5 export it at four budgets, and verify each against the checkpoint")
    export(folder / "digits.safetensors", ExportOptions(out=folder / "digits"))
    deploy(folder / "digits", RepositoryOptions(out=folder / "repository"))
    note("3/5 start the inference server and classify images it has not seen, over gRPC")
    images = _validation_images(folder / "images")
    lines = []
    free = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0)
    with Server(folder / "repository", free) as server, Client(server.url, "digits") as client:
        for budget in (1.0, 0.125):
            answers = client.classify(images, budget=budget, top=1)
            labels = ", ".join(answer.labels[0][0] for answer in answers)
            lines.append(f"{answers[0].variant} answers {labels}")
    lines.append("the labels are " + ", ".join(path.stem.split("-")[0] for path in images))
    return lines


def _validation_images(folder: Path) -> list[Path]:
    """Write eight digits as `<label>-<index>.png`; the test part of the data stays unread."""
    from PIL import Image

    from saccade.models.data.datasets import load_data

    data = load_data("digits", "validation")
    folder.mkdir()
    paths = []
    for index in range(8):
        label = data.class_names[int(data.labels[index])]
        paths.append(folder / f"{label}-{index}.png")
        Image.fromarray(data.images[index, :, :, 0]).save(paths[-1])
    return paths


def _benchmark_group(folder: Path) -> dict[str, Any]:
    from saccade.exporter.export import export
    from saccade.exporter.group import GroupOptions, group
    from saccade.models.shipped import shipped_checkpoint
    from saccade.serving.bench.bench import bench

    note("4/5 export three shipped models that read road signs, group them, and certify a policy")
    signs, members = folder / "signs", [folder / "members" / size for size in SIZES]
    for member in members:
        export(shipped_checkpoint(f"signs-{member.name}"), ExportOptions(out=member))
    group(members, GroupOptions(signs))
    with temporary_folder("demo") as temporary:
        # A policy is the cheapest one by measured time, so a quick measurement comes first.
        bench(signs, replace(_QUICK, out=temporary / "quick"))
    _certify(signs)
    note("5/5 benchmark each model and the policy on signs not seen before, through the server")
    # It stops earlier if the intervals are narrow.
    return bench(signs, replace(_FULL, out=folder / "report")).to_dict()


def _certify(variants: Path) -> None:
    """Write a policy, or print why none is certified; the demo continues without it."""
    from saccade.exporter.evaluation.calibrate import calibrate, refusal

    done = calibrate(variants, CalibrateOptions(data=_DATA, split="validation", risk=(RISK,)))
    for one in done.refused:
        note(f"no policy: {refusal(one)}")
