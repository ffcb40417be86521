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
from saccade.exporter.artefact.frontier import (
    POLICIES,
    Entry,
    NarrowerMeasurement,
    PolicyEntry,
    mark_dominated,
)
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.evaluation.load_inputs import Inputs, inputs_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime, loaded, runtime_named
from saccade.files import new_folder, refuse_existing
from saccade.machine import Machine, this_machine
from saccade.models.data.loaded_once import loaded_once
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.progress import Advance, Report, bar, progress_of, reporting
from saccade.serving.bench import in_process, report, served
from saccade.serving.bench.by_threads import (
    Threads,
    counts,
    measure_threads,
    opened_with,
    share_of,
)
from saccade.serving.bench.expected import by_clock, inside_s, served_s
from saccade.serving.bench.in_process import InProcess, Measured
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import (
    ServedPolicies,
    entry_of_policy,
    served_policies_of,
    with_served,
)
from saccade.serving.bench.policy_works import PolicyWorks, policy_works
from saccade.serving.bench.report_content import (
    Measurement,
    add_served,
    calls_of,
    content,
    policy_content,
    raw_samples,
)
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.scored import entry_of_result
from saccade.serving.bench.scoring import scores_within
from saccade.serving.bench.servers import (
    RunningReport,
    by_precision,
    measure_running,
    server_under_load,
)
from saccade.serving.bench.stopping import Deadline, duration_text, rounds_suffice
from saccade.serving.bench.work import Work, works_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.verbosity import note

DISTINCT_REQUESTS = 64
_ALL = "all"  # the key of the server of all precisions
IN_PROCESS_SHARE = 1 / 6  # of a window, for each of the seven batch sizes
_SCORING_SHARE = 0.5  # of --seconds
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
        figures = {key: value for key, value in self.full.items() if key != "examples"}
        lists = {key: _unsampled(figures[key]) for key in ("variants", POLICIES) if key in figures}
        data = {**figures, **lists, "folder": str(self.folder)}
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


def _unsampled(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "samples"} for one in figures]


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
    with reporting(progress), loaded_once():
        if folder is None:
            return measure_running(options)
        return _bench(_workload(folder, options), options)


def _bench(workload: "_Workload", options: BenchOptions) -> BenchReport:
    machine = this_machine(runtime_named(options.runtime).label())
    works = [work for one_works in workload.works.values() for work in one_works]
    measurable: dict[tuple[str, str], Measured] = {work.key: work for work in works}
    measurable |= {work.key: work for work in workload.policies.works}
    inside, through = _round_s(workload, works, options)
    seconds = min(options.rounds * (inside + through), workload.deadline.left)
    with progress_of("bench", seconds) as seconds_passed:
        advance = by_clock(seconds_passed)
        measured = in_process.measure(
            measurable,
            seconds=options.window_s * IN_PROCESS_SHARE,
            rounds=options.rounds,
            advance=advance,
            deadline=workload.deadline.part(inside / (inside + through)),
        )
        measured = {key: _with_threads(key, one, workload) for key, one in measured.items()}
        figures = _figures(workload, measured, machine)
        server = None
        if options.server:
            server, figures = _through_servers(workload, works, figures, options, advance)
    values = {name: result.samples for name, result in workload.results.items()}
    entries = mark_dominated(figures.entries, values)
    full = content(
        [
            Measurement(
                variant, workload.results[variant.name], entry, figures.samples[entry.variant]
            )
            for entry, variant in zip(entries, workload.folder.variants, strict=True)
        ],
        options,
    )
    full |= {"machine": machine.to_dict(), "server": server}
    full |= policy_content(figures.policies, figures.samples, workload.policies.left_out)
    full["examples"] = shown_examples(workload.models, workload.asked, workload.results)
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
        # Before the report appears: after a kill in between, the same command can be repeated.
        narrower: tuple[str, ...] = ()
        try:
            workload.folder.merge(
                entries, policies=figures.policies, over_larger=options.replace_frontier
            )
        except NarrowerMeasurement as kept:
            narrower = kept.less
    return BenchReport(options.out, full, workload.folder.path / FRONTIER, narrower)


@dataclass(frozen=True)
class _Figures:
    """The figures of variants and policies, and their raw samples by variant or policy title."""

    entries: tuple[Entry, ...]
    policies: tuple[PolicyEntry, ...]
    samples: Samples


def _figures(
    workload: "_Workload", measured: Mapping[tuple[str, str], InProcess], machine: Machine
) -> _Figures:
    """Return the figures without a server."""
    results, variants = workload.results, workload.folder.variants
    entries = {
        variant.name: entry_of_result(
            variant, results[variant.name], measured, machine, workload.ops
        )
        for variant in variants
    }
    samples = {name: raw_samples(result, measured) for name, result in results.items()}
    policies = []
    for work in workload.policies.works:
        assert workload.policies.answered is not None
        full = work.content.full
        policies.append(
            entry_of_policy(
                work,
                workload.policies.answered,
                results[full],
                measured,
                machine,
                entries[full].ops,
            )
        )
        samples[work.title] = {"in_process_s": calls_of(measured[work.key]), "grpc": {}}
    return _Figures(tuple(entries.values()), tuple(policies), samples)


@dataclass(frozen=True)
class _Workload:
    """The variants to measure, their scores, and their requests."""

    folder: ArtefactFolder
    models: Sequence[EvaluatedModel]
    results: Mapping[str, EvaluationResult]
    works: Mapping[str, Sequence[Work]]
    policies: PolicyWorks
    served: ServedPolicies
    ops: Ops
    threads: Threads
    asked: EvaluateOptions  # with the number of samples that were scored
    deadline: Deadline


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
    deadline = Deadline(options.seconds)
    share = share_of(folder.variants, runtime)
    models = subjects_of_folder(folder, runtime, kernels=options.op_library, threads=share)
    ops = next((subject.ops for subject in models if subject.ops), None)
    asked = options.evaluation()
    data = options.data or _default_data(models, asked, folder)
    inputs = {one.name: inputs_of(one, data, DISTINCT_REQUESTS) for one in folder.variants}
    works = _works(folder.variants, models, inputs)

    def load(variant: VariantFiles, count: int) -> dict[str, Runner]:
        return loaded(runtime, folder, variant.components.values(), ops, threads=count)

    rates: dict[tuple[str, str], dict[int, float]] = {}
    with progress_of("threads", len(works)) as advance:
        for variant in folder.variants:
            advance(0, variant.name)
            own = works[variant.name]
            rates |= measure_threads(variant, own, counts(runtime, share), load)
            advance()
    # All variants answer each sample, one after the other.
    per_second = 1 / sum(1 / rates[own[0].key][share] for own in works.values())
    _announce(options, per_second)
    scores, asked = scores_within(
        models,
        asked,
        lambda: folder.checkpoint,
        per_second=per_second,
        deadline=deadline.part(_SCORING_SHARE),
    )
    results = {score.variant: score for score in scores}
    threads = Threads(share, rates)
    models = opened_with(models, folder.variants, threads, load)
    asked = replace(asked, data=data)
    samples = {name: result.samples for name, result in results.items()}
    policies = policy_works(folder, models, runtime, asked, samples)
    served = served_policies_of(policies, folder.variants) if options.server else ServedPolicies()
    works = _works(folder.variants, models, inputs)
    return _Workload(
        folder, models, results, works, policies, served, ops, threads, asked, deadline
    )


def _default_data(
    models: Sequence[EvaluatedModel], asked: EvaluateOptions, folder: ArtefactFolder
) -> str:
    """Return the name of the data that is scored if none is given."""
    first, *_ = scores_of(models[:1], replace(asked, limit=2), lambda: folder.checkpoint)
    return first.data


def _works(
    variants: Sequence[VariantFiles],
    models: Sequence[EvaluatedModel],
    inputs: Mapping[str, Inputs],
) -> dict[str, list[Work]]:
    works = {}
    for variant, model in zip(variants, models, strict=True):
        runners = {role: component.run for role, component in model.components.items()}
        works[variant.name] = works_of(variant, inputs[variant.name], runners)
    return works


def _announce(options: BenchOptions, per_second: float) -> None:
    """Say how long it may take; the speeds of single rounds follow from the rates."""
    note(
        f"bench: all variants together answer {per_second:.3g} samples per second. It stops when "
        f"the intervals are narrow, at the latest after about {duration_text(options.seconds)}, of "
        f"which scoring may take {duration_text(_SCORING_SHARE * options.seconds)} (--seconds)."
    )


def _round_s(
    workload: _Workload, works: Sequence[Work], options: BenchOptions
) -> tuple[float, float]:
    """Return the expected seconds of one round in process, and through servers."""
    clients, followed = options.concurrency, workload.served
    full = max(workload.threads.rate(work.key) for work in works)
    rates = [workload.threads.rate(work.key) for work in works]
    window = options.window_s
    inside = [*rates, *(full for _ in workload.policies.works)]
    within = sum(inside_s(rate, window * IN_PROCESS_SHARE) for rate in inside)
    if not options.server:
        return within, 0.0
    alone = {1, *clients}
    through = sum(served_s(rate, clients, window) + served_s(rate, alone, window) for rate in rates)
    policies = len(followed.works) + followed.full_alone
    return within, through + policies * served_s(full, alone, window)


def _with_threads(key: tuple[str, str], measured: InProcess, workload: _Workload) -> InProcess:
    threads = workload.threads
    if key not in threads.rates:  # a policy, whose variants have their own
        return measured
    return replace(measured, threads=threads.of(key), by_threads=threads.rates[key])


def _through_servers(
    workload: _Workload,
    works: Sequence[Work],
    figures: _Figures,
    options: BenchOptions,
    advance: Advance,
) -> tuple[str, _Figures]:
    """Measure through servers; return the server's version and the figures with these points."""
    precision = {entry.variant: entry.precision for entry in figures.entries}
    load_results: dict[str, dict[served.Place, list[LoadResult]]] = {name: {} for name in precision}
    folders = by_precision(workload.folder, figures.entries)
    policies = workload.served
    if policies.works and len(folders) > 1:
        folders[_ALL] = workload.folder.only(workload.folder.variants, figures.entries)
    *_, last = folders  # the only precision, or all
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                server_under_load(
                    folder,
                    runtime=options.runtime,
                    op_library=workload.ops == "kernels",
                    policies=policies.followed if name == last else (),
                    labelling=policies.labelling if name == last else None,
                )
            )
            for name, folder in folders.items()
        }
        streams = {
            name: served.streams(
                server.url,
                [work for work in works if precision[work.variant] == name],
                options.concurrency,
            )
            for name, server in running.items()
        }
        if policies.works:
            full, *_ = workload.works[policies.works[0].content.full]
            streams[last] |= served.policy_streams(
                running[last].url, policies, full, options.concurrency
            )
        for turn in range(options.rounds):
            for name, server in running.items():
                seconds, seed = options.window_s, options.seed + turn
                results = server.measure(streams[name], seconds=seconds, seed=seed, advance=advance)
                for place, result in results.items():
                    load_results.setdefault(place[0], {}).setdefault(place, []).append(result)
            rates = served.rates_of(load_results, max(options.concurrency))
            if rounds_suffice(rates, workload.deadline.left):
                break
        version = next(iter(running.values())).version
    full_samples: dict[str, Any] = {"grpc": {}}
    samples = {served.FULL: full_samples, **figures.samples}
    points = {name: add_served(samples[name], own) for name, own in load_results.items()}
    for policy in policies.works:
        if full_samples["grpc"]:
            samples[policy.title]["full_grpc"] = full_samples["grpc"]
    entries = tuple(replace(entry, grpc=points[entry.variant]) for entry in figures.entries)
    measured = tuple(
        with_served(entry, points, points.get(served.FULL, points[entry.full]))
        for entry in figures.policies
    )
    return version, replace(figures, entries=entries, policies=measured)
