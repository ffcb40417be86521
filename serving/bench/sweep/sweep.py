# SPDX-License-Identifier: Apache-2.0
"""`saccade sweep`: export and measure a checkpoint at many budgets and precisions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.files import new_folder, sha256_of
from saccade.core.leftovers import temporary_folder
from saccade.core.machine import Machine, this_machine
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.core.verbosity import note
from saccade.exporter.artefact.variant import check_budgets
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.evaluated_model import subjects_of_folder
from saccade.exporter.evaluation.tasks import EvaluateOptions, task_asked
from saccade.exporter.runtimes.runtime import BuildOptions, Runtime, build, runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.data.options import loaded_once
from saccade.models.sparo.select import selected_checkpoint
from saccade.serving.bench import report
from saccade.serving.bench.bench import BenchReport
from saccade.serving.bench.measurement import by_cost, content
from saccade.serving.bench.options import SweepOptions
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.sweep.points import (
    ReadyPoint,
    collected,
    points_of,
    prepare,
    ready_points,
)
from saccade.serving.bench.sweep.state import Failure, Point, SweepFolder, link, open_repository
from saccade.serving.bench.sweep.turns import Turns
from saccade.serving.bench.workload import measured_runtime

_TRIED_SAMPLES = 16  # samples of the data to try before anything is exported
# A change of any other option makes a different sweep.
_FREE = ("out", "jobs", "retry", "force", "slots", "budget", "precision", "engine", "name")


@dataclass(frozen=True, kw_only=True)
class SweepReport(BenchReport):
    """Results of a sweep in its folder, and the points that failed."""

    failures: tuple[Failure, ...]

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if a point failed, else 0."""
        return 1 if self.failures else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures without the raw samples."""
        return {**super().to_dict(), "artefacts": str(self.folder / "artefacts")}


def sweep(
    checkpoint: Path | str, options: SweepOptions, *, progress: Report | None = bar
) -> SweepReport:
    """Export, score and measure every budget at every precision; write artefacts and report.

    Every finished piece of work is kept: run the same sweep again to resume an interrupted one.

    Raises: SaccadeError for unsuitable options or data, or a folder with other content, GateFailed
        if no point passed.
    """
    loaded = load(Path(checkpoint), check=partial(check_budgets, given=options.budget))
    runtime = measured_runtime(options)
    for one_runtime in options.built:
        one_runtime.require()
    if options.op_library and not runtime.has_kernels():
        # Resuming this sweep on a machine with kernels must not mix the two.
        options = replace(options, op_library=False)
    machine = this_machine(runtime.label())
    points = points_of(loaded, options)
    if options.slots:
        with temporary_folder("slots") as temporary:
            selected_checkpoint(loaded, options.slots, temporary / "selected.safetensors")
    begun = SweepFolder(options.out)
    if options.force or not any(begun.place(point).exists() for point in points):
        _try_data(loaded, options)
    with open_repository(
        options.out, _identity(loaded, points, options, machine), force=options.force
    ) as state:
        try:
            with reporting(progress), loaded_once():
                return _swept(state, loaded, points, options, machine)
        except KeyboardInterrupt:
            note("Finished work is kept. To resume the sweep, run the same command again.")
            raise
        except OSError as error:
            raise SaccadeError(
                f"{options.out}: {error}. Finished work is kept: make room or fix the cause, then "
                "run the same command again."
            ) from error


def _swept(
    state: SweepFolder,
    checkpoint: Checkpoint,
    points: Sequence[Point],
    options: SweepOptions,
    machine: Machine,
) -> SweepReport:
    """Export and score the points, measure those that passed, and write artefacts and report."""
    if options.retry:
        for point in points:
            state.forgive(point)
    with progress_of("export", len(points)) as advance:
        prepare(state, points, checkpoint, options, advance)
    ready = ready_points(state, points)
    turns = Turns(state, collected(state, ready), ready, options)
    for runtime in options.built:
        build_engines(state, ready, runtime, retry=options.retry)
    steps = len(ready) * options.rounds * (1 + options.server)
    with progress_of("measure", steps) as advance:
        turns.measure_in_process(advance)
        if options.server:
            turns.measure_served(machine, advance)
    ready = turns.left
    failures = [failure for point in points if (failure := state.failure(point))]
    engines: list[dict[str, Any]] = []
    for runtime in options.built:
        rows, refused = collect_engines(state, ready, runtime)
        engines, failures = engines + rows, failures + refused
    if not ready:
        reasons = (f"{one.variant} ({one.stage}): {one.reason}" for one in failures)
        raise GateFailed(
            "\n".join(("no point of the sweep passed, so nothing was measured.", *reasons))
        )
    folder = collected(state, ready)  # without the points that failed during the measurement
    measured = [turns.measurement(one, machine, served=options.server) for one in ready]
    costs = {one.variant.name: one.costs(one.entry) for one in measured}
    values = {one.variant.name: one.result.samples for one in measured}
    entries, dominated = by_cost([one.entry for one in measured], costs, values)
    servers = {
        state.finished(one.point, f"served-{options.rounds - 1}")["server"]
        for one in ready
        if options.server
    }
    full = content(measured, entries, options, ", ".join(sorted(servers)) or None)
    for variant in full["variants"]:
        name = variant["variant"]
        variant["costs"] = {cost: asdict(figure) for cost, figure in costs[name].items()}
        for cost, rivals in dominated.items():
            variant["costs"][cost]["dominated_by"] = rivals[name]
    # The date of the last measurement, not of this run: a finished sweep may be repeated.
    full["date"] = datetime.fromtimestamp(state.last_written, UTC).isoformat(timespec="seconds")
    models = subjects_of_folder(folder, runtime_named(options.runtime), kernels=options.op_library)
    results = {one.variant.name: one.result for one in measured}
    scored = options.evaluation(ready[0].result.data)
    full["examples"] = shown_examples(models, scored, results)
    full |= {"failed": [asdict(failure) for failure in failures], "engines": engines}
    with new_folder(state.report, force=True) as out:
        report.write_report(full, out)
    folder.merge(entries)
    return SweepReport(state.path, full, failures=tuple(failures))


def _identity(
    checkpoint: Checkpoint, points: Sequence[Point], options: SweepOptions, machine: Machine
) -> dict[str, Any]:
    """Return the identity of a sweep: what must be equal for a run to resume another one."""
    asked = {key: value for key, value in asdict(options).items() if key not in _FREE}
    return asked | {
        "checkpoint": checkpoint.sha256,
        "points": sorted(point.variant for point in points),
        "engine": sorted(options.engine),
        "slots": sha256_of(options.slots) if options.slots else None,
        "device": machine.device,
        "runtime": machine.runtime,
    }


def _try_data(checkpoint: Checkpoint, options: SweepOptions) -> None:
    """Refuse unsuitable data or tasks now, rather than for each point after its export."""
    task_asked(checkpoint.family, options.task, checkpoint.path)
    if options.task is None:
        limit = min(options.limit or _TRIED_SAMPLES, _TRIED_SAMPLES)
        evaluate(checkpoint.path, EvaluateOptions(options.data, split=options.split, limit=limit))


def build_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime, *, retry: bool
) -> None:
    """Build an engine for each point; record a refusal, which does not fail the point itself."""
    name = f"engine-{runtime.name}"
    for one in ready:
        if retry:
            state.forgive(one.point, f"{name}-failed")
        out = state.place(one.point) / name
        built = out.is_dir() and state.read(one.point, name)
        if built or state.read(one.point, f"{name}-failed"):
            continue
        try:
            made = build(one.folder, BuildOptions(engine=runtime.name, out=out, force=True))
        except SaccadeError as error:
            state.write(one.point, f"{name}-failed", {"reason": str(error)})
        else:
            state.write(one.point, name, {"engine": runtime.name, "plans": made.files()})


def collect_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> tuple[list[dict[str, Any]], list[Failure]]:
    """Link the engines into the artefact folder, as `saccade build` does.

    Return a description of each, and of those that were refused.
    """
    rows, failures, name = [], [], f"engine-{runtime.name}"
    for one in ready:
        point = one.point
        if refused := state.read(point, f"{name}-failed"):
            reason = f"{runtime.name}: {refused['reason']}"
            failures.append(Failure(point.variant, point.setting, point.precision, "build", reason))
        if (built := state.read(point, name)) is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{runtime.name}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in (state.place(point) / name).iterdir():
            if path.is_file():
                link(path, place / path.name)
        rows += [
            {"variant": one.variant.name, "engine": runtime.name, **plan} for plan in built["plans"]
        ]
    return rows, failures
