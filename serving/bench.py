# SPDX-License-Identifier: Apache-2.0
"""Score and speed of every variant of an artefact folder, in process and through a server."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from saccade.export.manifest import Manifest, read_folder
from saccade.export.runners import onnx_session
from saccade.models.data.datasets import Dataset, load_data
from saccade.plugins.errors import SaccadeError, require
from saccade.plugins.files import new_folder, refuse_existing
from saccade.plugins.progress import Advance, progress
from saccade.serving import in_process, report, served
from saccade.serving.addresses import ServeOptions
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import (
    Entry,
    Score,
    mark_dominated,
    merge,
    read_frontier,
    wilson,
)
from saccade.serving.installation import check_installation, find_installation
from saccade.serving.load import LoadGenerator
from saccade.serving.machine import Machine, this_machine
from saccade.serving.server import Server
from saccade.serving.staging import staged_repository

_DISTINCT_REQUESTS = 64
_REPORTED_OPTIONS = ("seconds", "rounds", "concurrency", "seed")
# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)
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
    subject = _subject(Path(folder), options)
    machine, server = this_machine(), None
    points = (len(options.concurrency) + 1) * options.server
    steps = len(subject.manifests) * options.rounds * (len(in_process.BATCHES) + points)
    with progress("bench", steps) as advance:
        measured = _in_process(subject, options, advance)
        entries = _entries(subject, measured, machine)
        samples = {name: _samples(each, subject.data) for name, each in measured.items()}
        if options.server:
            with staged_repository(subject.folder, subject.manifests, entries) as repository:
                server, entries = _through_server(
                    repository, subject, entries, measured, options, samples, advance
                )
    correct = {name: np.asarray(each["correct"]) for name, each in samples.items()}
    entries = mark_dominated(entries, correct)
    full = _full(subject, entries, samples, options)
    full |= {"machine": machine.to_dict(), "server": server}
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
    merge(subject.folder, subject.model, entries)
    return BenchReport(options.out, full)


@dataclass(frozen=True)
class _Subject:
    """What is measured, and on what."""

    folder: Path
    manifests: Sequence[Manifest]
    data: Dataset

    @property
    def model(self) -> str:
        return self.manifests[0].variant.model


def _subject(folder: Path, options: BenchOptions) -> _Subject:
    manifests = read_folder(folder)
    if (folder / FRONTIER).exists():
        read_frontier(folder / FRONTIER)  # a broken one is refused now, not after the work
    return _Subject(folder, manifests, _test_split(options.data, manifests[0]))


def _full(
    subject: _Subject,
    entries: Sequence[Entry],
    samples: Mapping[str, Any],
    options: BenchOptions,
) -> dict[str, Any]:
    data = subject.data
    return {
        "schema": report.SCHEMA,
        "version": report.VERSION,
        "model": subject.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {"name": data.name, "sha256": data.sha256, "n": len(data.labels)},
        "options": {key: getattr(options, key) for key in _REPORTED_OPTIONS},
        "variants": [
            {**asdict(entry), **_cost(manifest), "samples": samples[entry.variant]}
            for entry, manifest in zip(entries, subject.manifests, strict=True)
        ],
    }


def _test_split(name: str, manifest: Manifest) -> Dataset:
    data = load_data(name, "test", preprocessing=manifest.preprocessing)
    # Classes without words are numbered: those are the model's own indices.
    numbered = data.class_names == tuple(str(index) for index in range(len(manifest.labels)))
    if not numbered and data.class_names != manifest.labels:
        raise SaccadeError(
            f"{name}: its {len(data.class_names)} classes begin with {data.class_names[:3]}, the "
            f"model's {len(manifest.labels)} with {manifest.labels[:3]}. "
            "Pass the data that the model was trained for with --data."
        )
    return data


def _in_process(
    subject: _Subject, options: BenchOptions, advance: Advance
) -> dict[str, in_process.InProcess]:
    sessions = {
        each.variant.name: onnx_session(subject.folder / each.file.name, threads=1)
        for each in subject.manifests
    }
    return in_process.measure(
        sessions,
        subject.data.images,
        seconds=options.seconds * _IN_PROCESS_SHARE,
        rounds=options.rounds,
        advance=advance,
    )


def _entries(
    subject: _Subject, measured: Mapping[str, in_process.InProcess], machine: Machine
) -> tuple[Entry, ...]:
    entries, data = [], subject.data
    for manifest in subject.manifests:
        found = measured[manifest.variant.name]
        top5 = in_process.correct(found.logits, data.labels, top=5)
        entry = Entry(
            variant=manifest.variant.name,
            sha256=manifest.file.sha256,
            budget=manifest.variant.budget,
            precision=manifest.variant.precision,
            runtime=machine.runtime,
            device=machine.device,
            score=_top1(in_process.correct(found.logits, data.labels), data),
            top5=round(float(top5.mean()), 6) if found.logits.shape[1] > 5 else None,
            in_process=found.summary(),
            grpc=None,
        )
        entries.append(entry)
    return tuple(entries)


def _top1(hits: np.ndarray, data: Dataset) -> Score:
    low, high = wilson(int(hits.sum()), len(hits))
    return Score(
        name="top-1",
        value=round(float(hits.mean()), 6),
        higher_is_better=True,
        unit="fraction",
        n=len(hits),
        interval=(round(low, 6), round(high, 6)),
        data=data.name,
        data_sha256=data.sha256,
    )


def _samples(found: in_process.InProcess, data: Dataset) -> dict[str, Any]:
    return {
        "correct": in_process.correct(found.logits, data.labels).astype(int).tolist(),
        "in_process_s": {str(size): calls.seconds for size, calls in found.calls.items()},
        "grpc": {},
    }


def _cost(manifest: Manifest) -> dict[str, Any]:
    cost = manifest.cost
    return {
        "kept": manifest.variant.kept,
        "total": manifest.variant.total,
        "unit": manifest.variant.unit,
        "file_bytes": manifest.file.bytes,
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds.total,
        "multiply_adds_by_part": cost.multiply_adds.by_part,
        "peak_activation_bytes": cost.peak_activation_bytes,
    }


def _through_server(
    repository: Path,
    subject: _Subject,
    entries: Sequence[Entry],
    measured: Mapping[str, in_process.InProcess],
    options: BenchOptions,
    samples: dict[str, dict[str, Any]],
    advance: Advance,
) -> tuple[str, tuple[Entry, ...]]:
    """The server's version, and the entries with what was measured through it."""
    with Server(repository, _QUIET) as server:
        streams = served.streams(
            server.url,
            subject.model,
            {entry.variant: entry.budget for entry in entries},
            subject.data.images[:_DISTINCT_REQUESTS],
            {name: each.logits for name, each in measured.items()},
            options.concurrency,
        )
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
    complete = []
    for entry in entries:
        keys = {point: (name, point) for name, point in streams if name == entry.variant}
        points = {point: served.point(streams[key], results[key]) for point, key in keys.items()}
        complete.append(replace(entry, grpc=points))
        samples[entry.variant]["grpc"] = {
            point: [served.raw(streams[key], result) for result in results[key]]
            for point, key in keys.items()
        }
    return version, tuple(complete)
