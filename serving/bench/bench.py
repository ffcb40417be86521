# SPDX-License-Identifier: Apache-2.0
"""Measure score and speed of every variant of an artefact folder, with and without a server."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import new_folder, refuse_existing
from saccade.core.machine import Machine, this_machine
from saccade.core.progress import Advance, Report, bar, progress_of, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import (
    POLICIES,
    FrontierEntry,
    NarrowerMeasurement,
    PolicyEntry,
    mark_dominated,
)
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.data.loaded_once import loaded_once
from saccade.serving.bench import in_process, report, served
from saccade.serving.bench.expected import by_clock, inside_s, served_s
from saccade.serving.bench.in_process import InProcessLoad, Measured
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import (
    ServedPolicies,
    entry_of_policy,
    with_served,
)
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
from saccade.serving.bench.servers import (
    RunningReport,
    by_precision,
    measure_running,
    server_under_load,
)
from saccade.serving.bench.stopping import rounds_suffice
from saccade.serving.bench.work import Work
from saccade.serving.bench.workload import IN_PROCESS_SHARE, Workload, workload_of

_ALL = "all"  # the key of the server of all precisions
Samples = dict[str, dict[str, Any]]
_LoadResults = dict[str, dict[served.Place, list[LoadResult]]]


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
        return _bench(workload_of(folder, options), options)


def _bench(workload: Workload, options: BenchOptions) -> BenchReport:
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

    entries: tuple[FrontierEntry, ...]
    policies: tuple[PolicyEntry, ...]
    samples: Samples


def _figures(
    workload: Workload, measured: Mapping[tuple[str, str], InProcessLoad], machine: Machine
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


def _round_s(
    workload: Workload, works: Sequence[Work], options: BenchOptions
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


def _with_threads(
    key: tuple[str, str], measured: InProcessLoad, workload: Workload
) -> InProcessLoad:
    threads = workload.threads
    if key not in threads.rates:  # a policy, whose variants have their own
        return measured
    return replace(measured, threads=threads.of(key), by_threads=threads.rates[key])


def _through_servers(
    workload: Workload,
    works: Sequence[Work],
    figures: _Figures,
    options: BenchOptions,
    advance: Advance,
) -> tuple[str, _Figures]:
    """Measure through servers; return the server's version and the figures with these points."""
    precision = {entry.variant: entry.precision for entry in figures.entries}
    load_results: _LoadResults = {name: {} for name in precision}
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
            left_s = workload.deadline.left
            for name, server in running.items():
                seconds, seed = options.window_s, options.seed + turn
                results = server.measure(streams[name], seconds=seconds, seed=seed, advance=advance)
                for place, result in results.items():
                    load_results.setdefault(place[0], {}).setdefault(place, []).append(result)
            rates = served.rates_of(load_results, max(options.concurrency))
            round_s = left_s - workload.deadline.left
            if rounds_suffice(rates, workload.deadline.left, round_s):
                break
        version = next(iter(running.values())).version
    return version, _with_points(figures, load_results, policies)


def _with_points(
    figures: _Figures, load_results: _LoadResults, policies: ServedPolicies
) -> _Figures:
    """Return the figures with the points that were measured through servers."""
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
    return replace(figures, entries=entries, policies=measured)
