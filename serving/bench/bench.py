# SPDX-License-Identifier: Apache-2.0
"""Measure score and speed of every variant of an artefact folder, with and without a server."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import new_folder, refuse_existing
from saccade.core.machine import this_machine
from saccade.core.progress import Advance, Report, bar, progress_of, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import (
    POLICIES,
    FrontierEntry,
    PolicyEntry,
    mark_dominated,
    with_cost_shares,
)
from saccade.exporter.artefact.precedence import NarrowerMeasurement
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.data.options import loaded_once
from saccade.serving.bench import in_process, report
from saccade.serving.bench.in_process import InProcessLoad, Measured
from saccade.serving.bench.measurement import Measurement, Windows, content, windows_of
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import measured_policy
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.running import RunningReport, measure_running
from saccade.serving.bench.served import through_servers
from saccade.serving.bench.stopping import Deadline
from saccade.serving.bench.work import Key
from saccade.serving.bench.workload import IN_PROCESS_SHARE, Workload, workload_of


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
    inside_s, served_s = workload.round_s(options)
    seconds = min(options.rounds * (inside_s + served_s), workload.deadline.left)
    server, windows = None, Windows()
    with progress_of("bench", seconds) as seconds_passed:
        advance = _by_clock(seconds_passed)
        deadline = workload.deadline.part(inside_s / (inside_s + served_s))
        inside = _in_process(workload, options, deadline, advance)
        measured = [
            Measurement(
                variant,
                workload.results[variant.name],
                {work.role: inside[work.key] for work in workload.works[variant.name]},
                machine,
                workload.ops,
            )
            for variant in workload.folder.variants
        ]
        if options.server:
            entries = [one.entry for one in measured]
            server, windows = through_servers(workload, entries, options, advance)
    measured = [replace(one, served=windows_of(windows, one.variant.name)) for one in measured]
    samples = {name: result.samples for name, result in workload.results.items()}
    dominated = mark_dominated([one.entry for one in measured], samples)
    marked = with_cost_shares(dominated, workload.folder.variants)
    full = content(measured, marked, options, server)
    answers = workload.policies.answers
    policies = [
        measured_policy(work, answers, measured, inside, windows)
        for work in workload.policies.works
        if answers is not None
    ]
    if policies:
        full[POLICIES] = [{**asdict(entry), "samples": raws} for entry, raws in policies]
    if workload.policies.left_out:
        full["policies_left_out"] = [
            {"policy": name, "reason": reason} for name, reason in workload.policies.left_out
        ]
    full["examples"] = shown_examples(workload.models, workload.asked, workload.results)
    return _written(full, marked, [entry for entry, _ in policies], workload, options)


def _by_clock(advance: Advance) -> Advance:
    """Return an `Advance` whose steps are the seconds that passed since its last call."""
    last = time.monotonic()

    def passed(steps: float = 1, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        advance(now - last, note)
        last = now

    return passed


def _in_process(
    workload: Workload, options: BenchOptions, deadline: Deadline, advance: Advance
) -> dict[Key, InProcessLoad]:
    """Measure variants and policies in turn; the threads of a policy's variants are theirs."""
    threads = workload.threads
    measured: dict[Key, Measured] = {work.key: work for work in workload.all_works}
    measured |= {work.key: work for work in workload.policies.works}
    inside = in_process.measure(
        measured,
        seconds=options.window_s * IN_PROCESS_SHARE,
        rounds=options.rounds,
        advance=advance,
        deadline=deadline,
    )
    for key, rates in threads.rates.items():
        inside[key] = replace(inside[key], threads=threads.of(key), by_threads=rates)
    return inside


def _written(
    full: dict[str, Any],
    entries: Sequence[FrontierEntry],
    policies: Sequence[PolicyEntry],
    workload: Workload,
    options: BenchOptions,
) -> BenchReport:
    folder = workload.folder
    narrower: tuple[str, ...] = ()
    with new_folder(options.out, force=options.force) as out:
        report.write_report(full, out)
        # Before the report appears: after a kill in between, the same command can be repeated.
        try:
            folder.merge(entries, policies=policies, over_larger=options.replace_frontier)
        except NarrowerMeasurement as kept:
            narrower = kept.less
    return BenchReport(options.out, full, folder.path / FRONTIER, narrower)
