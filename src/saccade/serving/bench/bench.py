# SPDX-License-Identifier: Apache-2.0
"""Measure score and speed of every variant of an artefact folder, with and without a server."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import Entry, NarrowerMeasurement, mark_dominated
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.evaluation.load_inputs import inputs_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.runtimes.runtime import Runtime, runtime_named
from saccade.files import new_folder, refuse_existing
from saccade.machine import this_machine
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.progress import Advance, Report, bar, progress_of, reporting
from saccade.serving.bench import in_process, report, served
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.report_content import Measurement, add_served, content, raw_samples
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.scored import entry_of_result
from saccade.serving.bench.servers import (
    RunningReport,
    by_precision,
    measure_running,
    server_under_load,
)
from saccade.serving.bench.work import Work, works_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.runtimes.registry import served_runtime

DISTINCT_REQUESTS = 64
IN_PROCESS_SHARE = 1 / 6  # of the seconds per point, for each of the seven batch sizes
Samples = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class BenchReport:
    """Report of a benchmark. The report.json in its folder also contains the raw samples."""

    folder: Path
    full: dict[str, Any]
    frontier: Path | None = None  # frontier.json of the measured folder
    narrower: tuple[str, ...] = ()  # why an existing, larger frontier.json was kept

    def to_dict(self) -> dict[str, Any]:
        """Return the figures without the raw samples and the images."""
        variants = [
            {key: value for key, value in variant.items() if key != "samples"}
            for variant in self.full["variants"]
        ]
        figures = {key: value for key, value in self.full.items() if key != "examples"}
        data = {**figures, "folder": str(self.folder), "variants": variants}
        if self.frontier:
            data |= {"frontier": str(self.frontier), "frontier_kept": list(self.narrower)}
        return data

    def to_text(self) -> Any:
        """Return the tables for a terminal."""
        from rich.console import Group
        from rich.text import Text

        tables = report.render(self.to_dict())
        return Group(tables, "", Text(self._kept())) if self.narrower else tables

    def _kept(self) -> str:
        return (
            f"{self.frontier}: was not changed, because it contains a larger measurement: "
            f"{'; '.join(self.narrower)}. This measurement is in {self.folder} only. To replace "
            "the larger one, run the command again with --replace-frontier."
        )


def bench(
    folder: ArtefactFolder | Path | str | None,
    options: BenchOptions,
    *,
    progress: Report | None = bar,
) -> BenchReport | RunningReport:
    """Measure every variant, write the report, and update the folder's frontier.json.

    With `options.url` instead of a folder, the variants of a running server are measured. No
    frontier is written then, because the server's machine is unknown here. A frontier.json with a
    larger measurement of the same variants (more samples, through a server) is kept, unless the
    options request to replace it. Nothing is written before everything is measured: an interrupted
    run leaves the previous report and frontier unchanged.

    Raises: SaccadeError for unsuitable data or folders, ServerFailed if the server fails.
    """
    refuse_existing(options.out, force=options.force)
    if (folder is None) == (options.url is None):
        found = "both" if folder else "neither"
        raise SaccadeError(
            f"found {found}, expected a folder of artefacts or --url HOST:PORT of a running "
            "server. Pass one of them: saccade bench FOLDER --out REPORT"
        )
    with reporting(progress):
        if folder is None:
            return measure_running(options)
        return _bench(_workload(folder, options), options)


def _bench(workload: "_Workload", options: BenchOptions) -> BenchReport:
    variants = workload.folder.variants
    machine, server = this_machine(runtime_named(options.runtime).label()), None
    works = [work for one_works in workload.works.values() for work in one_works]
    with progress_of("bench", _steps(works, options)) as advance:
        measured = in_process.measure(
            {work.key: work for work in works},
            seconds=options.seconds * IN_PROCESS_SHARE,
            rounds=options.rounds,
            advance=advance,
        )
        entries = tuple(
            entry_of_result(
                variant, workload.results[variant.name], measured, machine, workload.ops
            )
            for variant in variants
        )
        samples = {name: raw_samples(result, measured) for name, result in workload.results.items()}
        if options.server:
            server, entries = _through_servers(workload, works, entries, options, samples, advance)
    values = {name: result.samples for name, result in workload.results.items()}
    entries = mark_dominated(entries, values)
    full = content(
        [
            Measurement(variant, workload.results[variant.name], entry, samples[variant.name])
            for entry, variant in zip(entries, variants, strict=True)
        ],
        options,
    )
    full |= {"machine": machine.to_dict(), "server": server}
    full["examples"] = shown_examples(workload.models, options, workload.results)
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
        # Before the report appears: after a kill in between, the same command can be repeated.
        narrower: tuple[str, ...] = ()
        try:
            workload.folder.merge(entries, over_larger=options.replace_frontier)
        except NarrowerMeasurement as kept:
            narrower = kept.less
    return BenchReport(options.out, full, workload.folder.path / FRONTIER, narrower)


@dataclass(frozen=True)
class _Workload:
    """The variants to measure, their scores, and their requests."""

    folder: ArtefactFolder
    models: Sequence[EvaluatedModel]
    results: Mapping[str, EvaluationResult]
    works: Mapping[str, Sequence[Work]]
    ops: Ops


def check_served_here(runtime: Runtime) -> None:
    """Check that the bundled server can run the runtime's files here.

    Raises: SaccadeError if it cannot.
    """
    if runtime.served is None or not served_runtime(runtime.name).bundled:
        raise SaccadeError(
            f"--runtime is {runtime.name}, but the bundled server does not have this runtime. To "
            "measure it without a server, pass --no-server."
        )
    check_installation(find_installation())


def _workload(folder: ArtefactFolder | Path | str, options: BenchOptions) -> _Workload:
    folder = ArtefactFolder.open(folder)
    _ = folder.variants, folder.frontier  # refused before slow imports, and before the work
    for package in ("matplotlib", "plotly"):
        require(package, extra="bench")
    runtime = runtime_named(options.runtime)
    runtime.require()
    if options.server:
        check_served_here(runtime)
    models = subjects_of_folder(folder, runtime, kernels=options.op_library)
    asked = EvaluateOptions(options.data, task=options.task, limit=options.limit)
    scores = scores_of(models, asked, lambda: folder.checkpoint)
    results = {score.variant: score for score in scores}
    runners = {
        subject.name: {role: component.run for role, component in subject.components.items()}
        for subject in models
    }
    works = {}
    for variant in folder.variants:
        inputs = inputs_of(variant, options.data or results[variant.name].data, DISTINCT_REQUESTS)
        works[variant.name] = works_of(variant, inputs, runners[variant.name])
    ops = next((subject.ops for subject in models if subject.ops), None)
    return _Workload(folder, models, results, works, ops)


def _steps(works: Sequence[Work], options: BenchOptions) -> int:
    clients = options.concurrency
    served_points = (len(clients) + len({1, *clients})) * options.server
    return len(works) * options.rounds * (len(in_process.BATCHES) + served_points)


def _through_servers(
    workload: _Workload,
    works: Sequence[Work],
    entries: Sequence[Entry],
    options: BenchOptions,
    samples: Samples,
    advance: Advance,
) -> tuple[str, tuple[Entry, ...]]:
    """Measure through servers; return the server's version and the entries with the figures."""
    precision = {entry.variant: entry.precision for entry in entries}
    load_results: dict[str, dict[served.Place, list[LoadResult]]] = {name: {} for name in precision}
    kernels = workload.ops == "kernels"
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                server_under_load(folder, runtime=options.runtime, op_library=kernels)
            )
            for name, folder in by_precision(workload.folder, entries).items()
        }
        streams = {
            name: served.streams(
                server.url,
                [work for work in works if precision[work.variant] == name],
                options.concurrency,
            )
            for name, server in running.items()
        }
        for turn in range(options.rounds):
            for name, server in running.items():
                seconds, seed = options.seconds / options.rounds, options.seed + turn
                results = server.measure(streams[name], seconds=seconds, seed=seed, advance=advance)
                for place, result in results.items():
                    load_results[place[0]].setdefault(place, []).append(result)
        version = next(iter(running.values())).version
    return version, tuple(
        replace(entry, grpc=add_served(samples[entry.variant], load_results[entry.variant]))
        for entry in entries
    )
