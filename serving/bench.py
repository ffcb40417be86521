# SPDX-License-Identifier: Apache-2.0
"""Score and speed of every variant of an artefact folder, in process and through a server."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from saccade.export.manifest import SUFFIX, Manifest, read_folder
from saccade.models.data.datasets import Dataset, load_data
from saccade.plugins.errors import SaccadeError, require
from saccade.plugins.files import new_folder, refuse_existing
from saccade.plugins.progress import Advance, progress
from saccade.serving import frontier, in_process, report, served
from saccade.serving.addresses import ServeOptions
from saccade.serving.installation import check_installation, find_installation
from saccade.serving.load import LoadGenerator, Stream
from saccade.serving.machine import Machine, this_machine

_DISTINCT_REQUESTS = 64
_IN_PROCESS_SHARE = 1 / 6  # of the seconds a point, for each of the seven batch sizes


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, how long, and where the report goes."""

    data: str  # digits, digits-sum, a folder of class folders, or an .npz; its test part is read
    out: Path  # folder for report.json, report.html and frontier.png
    force: bool = False  # replace what stands at --out
    server: bool = True  # also measure through a server of its own
    seconds: float = 1.5  # measured time a point, over all rounds
    rounds: int = 3  # variants take turns this often
    concurrency: tuple[int, ...] = (1, 4, 16)  # clients that wait for an answer each
    seed: int = 0  # of the order of the turns

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and 0.01 <= self.seconds <= 3600):
            raise SaccadeError(f"--seconds is {self.seconds}, expected 0.01 to 3600.")
        if not 1 <= self.rounds <= 1000:
            raise SaccadeError(f"--rounds is {self.rounds}, expected 1 to 1000.")
        if not self.concurrency or not all(1 <= each <= 256 for each in self.concurrency):
            raise SaccadeError(
                f"--concurrency is {self.concurrency}, expected numbers from 1 to 256, like 1,4,16."
            )


@dataclass(frozen=True)
class BenchReport:
    """What a benchmark found; report.json in its folder holds the raw samples as well."""

    folder: Path
    full: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The figures without the raw samples."""
        variants = [
            {key: value for key, value in each.items() if key != "samples"}
            for each in self.full["variants"]
        ]
        return {**self.full, "folder": str(self.folder), "variants": variants}


def bench(folder: Path, options: BenchOptions) -> BenchReport:
    """Measure every variant, write the report, and set the folder's frontier.json.

    Nothing is written before everything is measured: an interrupted run leaves the previous
    report and frontier as they were.
    Raises: SaccadeError for data or a folder that does not fit, ServerFailed if the server does.
    """
    refuse_existing(options.out, force=options.force)
    require("matplotlib", extra="bench")
    require("onnxruntime", extra="cpu")
    if options.server:
        check_installation(find_installation())
    manifests = read_folder(folder)
    data = _test_split(options.data, manifests[0])
    machine = this_machine()
    points = (len(options.concurrency) + 1) * options.server
    steps = len(manifests) * options.rounds * (len(in_process.BATCHES) + points)
    server = None
    with progress("bench", steps) as advance:
        variants = _in_process(folder, manifests, data, options, advance)
        if options.server:
            with _staged(folder, manifests, _entries(variants, data, machine)) as staging:
                server = _through_server(staging, manifests[0], data, variants, options, advance)
    entries = _entries(variants, data, machine)
    for variant, entry in zip(variants, entries, strict=True):
        variant["dominated_by"] = entry["dominated_by"]
    full = {
        "schema": report.SCHEMA,
        "version": report.VERSION,
        "model": manifests[0].variant.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {"name": data.name, "sha256": data.sha256, "n": len(data.labels)},
        "machine": machine.to_dict(),
        "server": server,
        "options": {key: value for key, value in asdict(options).items() if key != "out"},
        "variants": variants,
    }
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
    frontier.merge(folder, entries)
    return BenchReport(options.out, full)


def _test_split(name: str, manifest: Manifest) -> Dataset:
    data = load_data(name, "test", preprocessing=manifest.preprocessing)
    if data.class_names != manifest.labels:
        raise SaccadeError(
            f"{name}: its {len(data.class_names)} classes begin with {data.class_names[:3]}, the "
            f"model's {len(manifest.labels)} with {manifest.labels[:3]}. "
            "Pass the data that the model was trained for with --data."
        )
    return data


def _in_process(
    folder: Path,
    manifests: Sequence[Manifest],
    data: Dataset,
    options: BenchOptions,
    advance: Advance,
) -> list[dict[str, Any]]:
    sessions = {
        each.variant.name: onnx_session(folder / each.file.name, threads=1) for each in manifests
    }
    calls = in_process.sample_all(
        sessions,
        data.images,
        seconds=options.seconds * _IN_PROCESS_SHARE,
        rounds=options.rounds,
        advance=advance,
    )
    variants = []
    for manifest in manifests:
        name = manifest.variant.name
        logits = in_process.logits(sessions[name], data.images)
        variants.append(
            {
                **_identity(manifest),
                **_score(logits, data),
                "in_process": in_process.summary(calls[name]),
                "grpc": None,
                "dominated_by": None,
                "samples": {
                    "correct": in_process.correct(logits, data.labels).astype(int).tolist(),
                    "logits_of_first": logits[:1].tolist(),
                    "in_process_s": {str(b): each.seconds for b, each in calls[name].items()},
                    "grpc": {},
                },
            }
        )
    return variants


def _identity(manifest: Manifest) -> dict[str, Any]:
    entry, cost = manifest.variant, manifest.cost
    return {
        "variant": entry.name,
        "sha256": manifest.file.sha256,
        "budget": entry.budget,
        "precision": entry.precision,
        "modules_kept": entry.modules_kept,
        "modules_total": entry.modules_total,
        "file_bytes": manifest.file.bytes,
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds.total,
        "multiply_adds_by_part": cost.multiply_adds.by_part,
        "peak_activation_bytes": cost.peak_activation_bytes,
    }


def _score(logits: np.ndarray, data: Dataset) -> dict[str, Any]:
    hits = in_process.correct(logits, data.labels)
    top5 = None
    if logits.shape[1] > 5:
        top5 = round(float(in_process.correct(logits, data.labels, top=5).mean()), 6)
    low, high = frontier.wilson(int(hits.sum()), len(hits))
    score = {
        "name": "top-1",
        "value": round(float(hits.mean()), 6),
        "higher_is_better": True,
        "unit": "fraction",
        "n": len(hits),
        "interval": [round(low, 6), round(high, 6)],
        "data": data.name,
        "data_sha256": data.sha256,
    }
    return {"score": score, "top5": top5}


@contextmanager
def _staged(
    folder: Path, manifests: Sequence[Manifest], entries: list[dict[str, Any]]
) -> Iterator[Path]:
    """The artefacts with a first frontier, elsewhere: the folder itself changes at the end."""
    with tempfile.TemporaryDirectory(prefix="saccade-bench-") as temporary:
        staging = Path(temporary) / "artefacts"
        staging.mkdir()
        names = [manifests[0].parent.name]
        for manifest in manifests:
            names += [manifest.file.name, manifest.variant.name + SUFFIX]
        for name in names:
            if (folder / name).exists():
                _link(folder / name, staging / name)
        frontier.merge(staging, entries)
        repository = Path(temporary) / "repository"
        deploy(staging, RepositoryOptions(out=repository))
        yield repository


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _through_server(
    repository: Path,
    manifest: Manifest,
    data: Dataset,
    variants: list[dict[str, Any]],
    options: BenchOptions,
    advance: Advance,
) -> str:
    free = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0)
    with Server(repository, free) as server:
        streams = _streams(server.url, manifest.variant.model, data, variants, options)
        with LoadGenerator(server.url, server_pid=server.pid) as generator:
            results = served.measure(
                generator,
                streams,
                seconds=options.seconds,
                rounds=options.rounds,
                seed=options.seed,
                advance=advance,
            )
        version = served.server_version(server.url)
    for variant in variants:
        keys = [key for key in streams if key[0] == variant["variant"]]
        variant["grpc"] = {key[1]: served.point(streams[key], results[key]) for key in keys}
        variant["samples"]["grpc"] = {
            key[1]: [served.raw(streams[key], result) for result in results[key]] for key in keys
        }
    return version


def _streams(
    url: str,
    router: str,
    data: Dataset,
    variants: list[dict[str, Any]],
    options: BenchOptions,
) -> dict[tuple[str, str], Stream]:
    images = [data.images[index : index + 1] for index in range(_DISTINCT_REQUESTS)]
    images = [image for image in images if len(image)]
    streams = {}
    for variant in variants:
        name, budget = variant["variant"], variant["budget"]
        expected = np.asarray(variant["samples"].pop("logits_of_first"), np.float32)
        served.check_answers(url, name, images[0], expected)
        direct = tuple(served.tensor_request(name, image) for image in images)
        for clients in options.concurrency:
            point = f"concurrency_{clients}"
            streams[name, point] = Stream(f"{name} x{clients}", name, clients, direct)
        # Of two precisions of one budget the router takes the faster: only that one is measured.
        if served.routed_to(url, router, images[0], budget) == name:
            encoded = tuple(served.encoded_request(router, image, budget) for image in images)
            streams[name, "router_concurrency_1"] = Stream(f"{name} routed", router, 1, encoded)
    return streams
