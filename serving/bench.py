# SPDX-License-Identifier: Apache-2.0
"""Score and speed of every variant of an artefact folder, in process and through a server."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from saccade.export.evaluate import evaluate
from saccade.export.evaluation.found import Found
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.manifest import Manifest, read_folder
from saccade.plugins.errors import require
from saccade.plugins.files import new_folder, refuse_existing
from saccade.plugins.progress import Advance, progress
from saccade.serving import in_process, report, served
from saccade.serving.addresses import ServeOptions
from saccade.serving.bench_options import BenchOptions
from saccade.serving.frontier import FILE_NAME as FRONTIER
from saccade.serving.frontier import Entry, mark_dominated, merge, read_frontier
from saccade.serving.installation import check_installation, find_installation
from saccade.serving.load import LoadGenerator
from saccade.serving.load_inputs import inputs_of
from saccade.serving.load_requests import server_version
from saccade.serving.machine import this_machine
from saccade.serving.scored import cost, entry_of_found, further_scores
from saccade.serving.server import Server
from saccade.serving.staging import staged_repository
from saccade.serving.variant_parts import VariantParts, grouped
from saccade.serving.work import Work, works_of

_DISTINCT_REQUESTS = 64
_REPORTED_OPTIONS = ("seconds", "rounds", "concurrency", "seed", "op_library")
# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)
_IN_PROCESS_SHARE = 1 / 6  # of the seconds a point, for each of the seven batch sizes
Samples = dict[str, dict[str, Any]]


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
    works = [work for each in subject.works.values() for work in each]
    with progress("bench", _steps(works, options)) as advance:
        measured = in_process.measure(
            {work.key: work for work in works},
            seconds=options.seconds * _IN_PROCESS_SHARE,
            rounds=options.rounds,
            advance=advance,
        )
        entries = tuple(
            entry_of_found(variant, subject.found[variant.name], measured, machine)
            for variant in subject.variants
        )
        samples = {each.name: _samples(each.name, subject, measured) for each in subject.variants}
        if options.server:
            with staged_repository(
                subject.folder, subject.manifests, entries, op_library=options.op_library
            ) as repository:
                server, entries = _through_server(
                    repository, works, entries, options, samples, advance
                )
    values = {name: each.samples for name, each in subject.found.items()}
    entries = mark_dominated(entries, values)
    full = _full(subject, entries, samples, options)
    full |= {"machine": machine.to_dict(), "server": server}
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
    merge(subject.folder, subject.model, entries)
    return BenchReport(options.out, full)


@dataclass(frozen=True)
class _Subject:
    """What is measured, what it scored, and what it is asked."""

    folder: Path
    manifests: Sequence[Manifest]
    variants: tuple[VariantParts, ...]
    found: Mapping[str, Found]
    works: Mapping[str, Sequence[Work]]

    @property
    def model(self) -> str:
        return self.manifests[0].variant.model


def _subject(folder: Path, options: BenchOptions) -> _Subject:
    manifests = read_folder(folder)
    if (folder / FRONTIER).exists():
        read_frontier(folder / FRONTIER)  # a broken one is refused now, not after the work
    variants = grouped(manifests)
    scored = evaluate(folder, EvaluateOptions(options.data, task=options.task, limit=options.limit))
    found = {each.variant: each for each in scored.found}
    kernels = None
    if options.op_library:
        from saccade.plugins import onnxruntime_library

        kernels = Path(onnxruntime_library())
    works = {}
    for variant in variants:
        inputs = inputs_of(variant, options.data or found[variant.name].data, _DISTINCT_REQUESTS)
        works[variant.name] = works_of(folder, variant, inputs, kernels)
    return _Subject(folder, manifests, variants, found, works)


def _steps(works: Sequence[Work], options: BenchOptions) -> int:
    served_points = (len(options.concurrency) + 1) * options.server
    return len(works) * options.rounds * (len(in_process.BATCHES) + served_points)


def _full(
    subject: _Subject, entries: Sequence[Entry], samples: Samples, options: BenchOptions
) -> dict[str, Any]:
    first = subject.found[subject.variants[0].name]
    return {
        "schema": report.SCHEMA,
        "version": report.VERSION,
        "model": subject.model,
        "family": subject.manifests[0].variant.family,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {"name": first.data, "sha256": first.data_sha256, "n": len(first.samples)},
        "options": {key: getattr(options, key) for key in _REPORTED_OPTIONS},
        "variants": [
            {
                **asdict(entry),
                **cost(variant),
                "scores": further_scores(subject.found[variant.name]),
                "samples": samples[variant.name],
            }
            for entry, variant in zip(entries, subject.variants, strict=True)
        ],
    }


def _samples(
    name: str, subject: _Subject, measured: Mapping[tuple[str, str], in_process.InProcess]
) -> dict[str, Any]:
    """The raw values behind the figures of one variant."""
    values = subject.found[name].samples
    whole = np.array_equal(values, values.astype(int))
    found: dict[str, Any] = {
        "values": [int(each) if whole else round(float(each), 6) for each in values],
        "grpc": {},
    }
    for work in subject.works[name]:
        calls = measured[work.key].calls
        place = found if not work.role else found.setdefault(work.role, {"grpc": {}})
        place["in_process_s"] = {str(size): each.seconds for size, each in calls.items()}
    return found


def _through_server(
    repository: Path,
    works: Sequence[Work],
    entries: Sequence[Entry],
    options: BenchOptions,
    samples: Samples,
    advance: Advance,
) -> tuple[str, tuple[Entry, ...]]:
    """The server's version, and the entries with what was measured through it."""
    with Server(repository, _QUIET) as server:
        streams = served.streams(server.url, works, options.concurrency)
        with LoadGenerator(server.url, server_pid=server.pid) as generator:
            results = served.measure(
                generator,
                streams,
                seconds=options.seconds,
                rounds=options.rounds,
                seed=options.seed,
                advance=advance,
            )
        version = server_version(server.url)
    grpc: dict[str, dict[str, Any]] = {entry.variant: {} for entry in entries}
    for place, stream in streams.items():
        name, role, point = place
        summaries, raws = grpc[name], samples[name]
        if role:
            summaries, raws = summaries.setdefault(role, {}), raws[role]
        summaries[point] = served.point(stream, results[place])
        raws["grpc"][point] = [served.raw(stream, result) for result in results[place]]
    return version, tuple(replace(entry, grpc=grpc[entry.variant]) for entry in entries)
