# SPDX-License-Identifier: Apache-2.0
"""`saccade sweep`: export and measure a checkpoint at many budgets and precisions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from saccade.core.errors import GateFailed, SaccadeError, require
from saccade.core.files import new_folder, sha256_of
from saccade.core.leftovers import temporary_folder
from saccade.core.machine import Machine, this_machine
from saccade.core.progress import Advance, Report, bar, progress_of, reporting
from saccade.core.verbosity import note
from saccade.exporter.artefact.variant import check_budgets
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.evaluated_model import subjects_of_folder
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.tasks import task_asked
from saccade.exporter.runtimes.build import build
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runtime import Runtime, runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.data.loaded_once import loaded_once
from saccade.models.sparo.select import selected_checkpoint
from saccade.serving.bench import report
from saccade.serving.bench.bench import BenchReport
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.sweep.assembled import assemble, entry_without_server
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bench.sweep.points import Failure, Point, points_of
from saccade.serving.bench.sweep.ready import ReadyPoint, collected, prepare, ready_points
from saccade.serving.bench.sweep.state import SweepFolder, link, open_repository
from saccade.serving.bench.sweep.turns import Bench, measure_in_process, measure_served
from saccade.serving.bench.workload import check_served_here

_TRIED_SAMPLES = 16  # samples of the data to try before anything is exported
# A change of any other option makes a different sweep.
_FREE = ("out", "jobs", "retry", "force", "slots", "budget", "precision", "engine", "name")


@dataclass(frozen=True)
class SweepReport:
    """Results of a sweep, and the points that failed."""

    folder: Path
    full: dict[str, Any]
    failures: tuple[Failure, ...]

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if a point failed, else 0."""
        return 1 if self.failures else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures without the raw samples."""
        content = BenchReport(self.folder / "report", self.full).to_dict()
        return {**content, "folder": str(self.folder), "artefacts": str(self.folder / "artefacts")}

    def to_text(self) -> Any:
        """Return the tables for a terminal."""
        return BenchReport(self.folder / "report", self.full).to_text()


def sweep(
    checkpoint: Path | str, options: SweepOptions, *, progress: Report | None = bar
) -> SweepReport:
    """Export, score and measure every budget at every precision; write artefacts and report.

    Every finished piece of work is kept: run the same sweep again to resume an interrupted one.

    Raises: SaccadeError for unsuitable options or data, or a folder with other content, GateFailed
        if no point passed.
    """
    loaded = load(Path(checkpoint), check=partial(check_budgets, given=options.budget))
    for package in ("matplotlib", "plotly", "jinja2"):
        require(package, extra="bench")
    runtime = runtime_named(options.runtime)
    for one_runtime in (runtime, *options.built):
        one_runtime.require()
    if options.server:
        check_served_here(runtime)
    if options.op_library and not runtime.has_kernels():
        # Resuming this sweep on a machine with kernels must not mix the two.
        options = replace(options, op_library=False)
    machine = this_machine(runtime.label())
    points = points_of(loaded, options)
    if options.slots:
        _try_slots(loaded, options.slots)
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
    if options.retry:
        for point in points:
            state.forgive(point)
    with progress_of("export", len(points)) as advance:
        prepare(state, points, checkpoint, options, advance)
    ready = ready_points(state, points)
    folder = collected(state, ready)
    for runtime in options.built:
        for candidate in ready if options.retry else ():
            forgive_engine(state, candidate, runtime)
        build_engines(state, ready, runtime)
    turns = options.rounds * (1 + options.server)
    with progress_of("measure", len(ready) * turns) as advance:
        ready = _measured(Bench(state, folder, ready, options), machine, advance)
    failures = [failure for point in points if (failure := state.failure(point))]
    for runtime in options.built:
        failures += refused_engines(state, ready, runtime)
    if not ready:
        raise GateFailed(_none_passed(failures))
    return _written(state, ready, failures, options, machine)


def _measured(bench: Bench, machine: Machine, advance: Advance) -> list[ReadyPoint]:
    """Measure what is missing, and return the points that did not fail."""
    state, options, ready = bench.state, bench.options, bench.ready
    measure_in_process(bench, advance)
    if options.server:
        left = [candidate for candidate in ready if state.failure(candidate.point) is None]
        entries = [entry_without_server(state, candidate, options, machine) for candidate in left]
        same = len(left) == len(ready)  # then reuse the bench: its sessions are open
        measure_served(bench if same else replace(bench, ready=left), entries, advance)
    return [candidate for candidate in ready if state.failure(candidate.point) is None]


def _written(
    state: SweepFolder,
    ready: Sequence[ReadyPoint],
    failures: Sequence[Failure],
    options: SweepOptions,
    machine: Machine,
) -> SweepReport:
    folder = collected(state, ready)  # without the points that failed during the measurement
    full, entries = assemble(state, ready, options, machine)
    models = subjects_of_folder(folder, runtime_named(options.runtime), kernels=options.op_library)
    results = {candidate.variant.name: candidate.result for candidate in ready}
    asked = options.evaluation(ready[0].result.data)
    full["examples"] = shown_examples(models, asked, results)
    full["failed"] = [asdict(failure) for failure in failures]
    full["engines"] = [
        engine for runtime in options.built for engine in collect_engines(state, ready, runtime)
    ]
    with new_folder(state.report, force=True) as out:
        report.write_report(full, out)
    folder.merge(entries)
    return SweepReport(state.path, full, tuple(failures))


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


def _try_slots(checkpoint: Checkpoint, slots: Path) -> None:
    with temporary_folder("slots") as temporary:
        selected_checkpoint(checkpoint, slots, temporary / "selected.safetensors")


def _try_data(checkpoint: Checkpoint, options: SweepOptions) -> None:
    """Refuse unsuitable data or tasks now, rather than for each point after its export."""
    task_asked(checkpoint.family, options.task, checkpoint.path)
    if options.task is None:
        limit = min(options.limit or _TRIED_SAMPLES, _TRIED_SAMPLES)
        evaluate(checkpoint.path, EvaluateOptions(options.data, split=options.split, limit=limit))


def _none_passed(failures: Sequence[Failure]) -> str:
    reasons = "\n".join(
        f"{failure.variant} ({failure.stage}): {failure.reason}" for failure in failures
    )
    return f"no point of the sweep passed, so nothing was measured.\n{reasons}"


def build_engines(state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime) -> None:
    """Build an engine for each point; record a refusal, which does not fail the point itself."""
    for candidate in ready:
        out = _folder(state, candidate, runtime)
        built = out.is_dir() and state.read(candidate.point, _piece(runtime))
        if built or state.read(candidate.point, _failed(runtime)):
            continue
        try:
            options = BuildOptions(engine=runtime.name, out=out, force=True)
            made = build(candidate.folder, options)
        except SaccadeError as error:
            state.write(candidate.point, _failed(runtime), {"reason": str(error)})
            continue
        content = {"engine": runtime.name, "plans": made.files()}
        state.write(candidate.point, _piece(runtime), content)


def collect_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> list[dict[str, Any]]:
    """Link the engines into the artefact folder, as `saccade build` does; describe each."""
    rows = []
    for candidate in ready:
        built = state.read(candidate.point, _piece(runtime))
        if built is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{runtime.name}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in _folder(state, candidate, runtime).iterdir():
            if path.is_file():
                link(path, place / path.name)
        rows += [
            {"variant": candidate.variant.name, "engine": runtime.name, **one}
            for one in built["plans"]
        ]
    return rows


def refused_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> list[Failure]:
    """Return the engines that were not built, with the reasons."""
    failures = []
    for candidate in ready:
        if refused := state.read(candidate.point, _failed(runtime)):
            point = candidate.point
            reason = f"{runtime.name}: {refused['reason']}"
            failures.append(Failure(point.variant, point.setting, point.precision, "build", reason))
    return failures


def forgive_engine(state: SweepFolder, candidate: ReadyPoint, runtime: Runtime) -> None:
    """Remove the record that the engine was refused."""
    (state.place(candidate.point) / f"{_failed(runtime)}.json").unlink(missing_ok=True)


def _piece(runtime: Runtime) -> str:
    return f"engine-{runtime.name}"


def _failed(runtime: Runtime) -> str:
    return f"engine-{runtime.name}-failed"


def _folder(state: SweepFolder, candidate: ReadyPoint, runtime: Runtime) -> Path:
    return state.place(candidate.point) / f"engine-{runtime.name}"
