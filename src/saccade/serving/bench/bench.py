# SPDX-License-Identifier: Apache-2.0
"""Score and speed of every variant of an artefact folder, in process and through a server."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import Entry, mark_dominated
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import subjects_of_folder
from saccade.exporter.evaluation.load_inputs import inputs_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.runtimes.runtime import Runtime, runtime_named
from saccade.files import new_folder, refuse_existing
from saccade.machine import this_machine
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.progress import Advance, progress
from saccade.serving.bench import in_process, report, served
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.report_content import Measurement, add_served, content, raw_samples
from saccade.serving.bench.scored import entry_of_result
from saccade.serving.bench.servers import by_precision, server_under_load
from saccade.serving.bench.work import Work, works_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.runtimes.registry import served_runtime

DISTINCT_REQUESTS = 64
IN_PROCESS_SHARE = 1 / 6  # of the seconds a point, for each of the seven batch sizes
Samples = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class BenchReport:
    """Report of a benchmark; report.json in its folder holds the raw samples as well."""

    folder: Path
    full: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The figures without the raw samples."""
        variants = [
            {key: value for key, value in variant.items() if key != "samples"}
            for variant in self.full["variants"]
        ]
        return {**self.full, "folder": str(self.folder), "variants": variants}

    def to_text(self) -> Any:
        """The tables, for a terminal."""
        return report.render(self.to_dict())


def bench(folder: ArtefactFolder | Path | str, options: BenchOptions) -> BenchReport:
    """Measure every variant, write the report, and set the folder's frontier.json.

    Nothing is written before everything is measured: an interrupted run leaves the previous
    report and frontier as they were.
    Raises: SaccadeError for data or a folder that does not fit, ServerFailed if the server does.
    """
    refuse_existing(options.out, force=options.force)
    require("matplotlib", extra="bench")
    runtime = runtime_named(options.runtime)
    runtime.require()
    if options.server:
        check_served_here(runtime)
    workload = _workload(ArtefactFolder.open(folder), runtime, options)
    variants = workload.folder.variants
    machine, server = this_machine(runtime.label()), None
    works = [work for one_works in workload.works.values() for work in one_works]
    with progress("bench", _steps(works, options)) as advance:
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
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
        # Before the report appears: a run that was killed between can be repeated as it was.
        workload.folder.merge(entries)
    return BenchReport(options.out, full)


@dataclass(frozen=True)
class _Workload:
    """Workload: variants under measurement, their scores, and their requests."""

    folder: ArtefactFolder
    results: Mapping[str, EvaluationResult]
    works: Mapping[str, Sequence[Work]]
    ops: Ops


def check_served_here(runtime: Runtime) -> None:
    """Raises: SaccadeError if no server of this machine runs what this runtime does."""
    if runtime.served is None or not served_runtime(runtime.name).bundled:
        raise SaccadeError(
            f"--runtime {runtime.name}: the bundled server does not run it. Measure it without a "
            "server: --no-server"
        )
    check_installation(find_installation())


def _workload(folder: ArtefactFolder, runtime: Runtime, options: BenchOptions) -> _Workload:
    folder.frontier  # noqa: B018 - a broken one is refused now, not after the work
    workload = subjects_of_folder(folder, runtime, kernels=options.op_library)
    asked = EvaluateOptions(options.data, task=options.task, limit=options.limit)
    scores = scores_of(workload, asked, lambda: folder.checkpoint)
    results = {score.variant: score for score in scores}
    runners = {
        subject.name: {role: component.run for role, component in subject.components.items()}
        for subject in workload
    }
    works = {}
    for variant in folder.variants:
        inputs = inputs_of(variant, options.data or results[variant.name].data, DISTINCT_REQUESTS)
        works[variant.name] = works_of(variant, inputs, runners[variant.name])
    ops = next((subject.ops for subject in workload if subject.ops), None)
    return _Workload(folder, results, works, ops)


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
    """The server's version, and the entries with what was measured through it."""
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
