# SPDX-License-Identifier: Apache-2.0
"""`saccade sweep`: export and measure a checkpoint at many budgets and precisions.

Every variant is measured once per round, so that the drift of a shared machine affects all equally.
Each turn is stored: an interrupted sweep does not repeat a finished one.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import GateFailed, SaccadeError, ServerFailed
from saccade.core.files import new_folder, sha256_of
from saccade.core.leftovers import temporary_folder
from saccade.core.machine import Machine, this_machine
from saccade.core.progress import Advance, Report, bar, progress_of, reporting, silent
from saccade.core.schema import typed
from saccade.core.verbosity import note
from saccade.core.worker import Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.artefact.variant import check_budgets
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.evaluated_model import subjects_of_folder
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs, inputs_of, task_asked
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime, loaded, ops_of, runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.data.options import loaded_once
from saccade.models.sparo.select import selected_checkpoint
from saccade.plugins.contract import Ops
from saccade.serving.bench import in_process, report, served
from saccade.serving.bench.bench import BenchReport
from saccade.serving.bench.in_process import Calls, InProcessLoad
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.measurement import Measurement, Windows, by_cost, content
from saccade.serving.bench.options import SweepOptions
from saccade.serving.bench.report_examples import shown_examples
from saccade.serving.bench.served import ServerUnderLoad, by_precision, server_under_load
from saccade.serving.bench.sweep.memory_process import BATCH, MemoryTask, ResidentMemory
from saccade.serving.bench.sweep.points import (
    ReadyPoint,
    build_engines,
    collect_engines,
    collected,
    points_of,
    prepare,
    ready_points,
)
from saccade.serving.bench.sweep.state import Failure, Point, SweepFolder, open_repository
from saccade.serving.bench.work import OpenVariant, Threads, counts, share_of
from saccade.serving.bench.workload import DISTINCT_REQUESTS, IN_PROCESS_SHARE, measured_runtime

_MEMORY_PROCESS = "saccade.serving.bench.sweep.memory_process"
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
        tried = EvaluateOptions(
            options.data, split=options.split, limit=limit, skip_bad=options.skip_bad
        )
        evaluate(checkpoint.path, tried)


@dataclass(frozen=True)
class Turns:
    """The measurement of points whose artefacts are in one folder; failures are recorded."""

    state: SweepFolder
    folder: ArtefactFolder
    ready: Sequence[ReadyPoint]
    options: SweepOptions
    _opened: dict[str, OpenVariant] = field(default_factory=dict)

    @property
    def left(self) -> list[ReadyPoint]:
        """The points that did not fail."""
        return [one for one in self.ready if self.state.failure(one.point) is None]

    @property
    def runtime(self) -> Runtime:
        """The runtime to measure."""
        return runtime_named(self.options.runtime)

    @cached_property
    def ops(self) -> Ops:
        """How the custom ops run."""
        manifests = [part for one in self.ready for part in one.variant.components.values()]
        return ops_of(self.runtime, manifests, kernels=self.options.op_library)

    def opened(self, ready: ReadyPoint) -> OpenVariant:
        """Return a variant with the threads to serve with, whose number is measured once."""
        name = ready.variant.name
        if name not in self._opened:
            share = share_of(self.folder.variants, self.runtime)
            runners = self._load(ready.variant, share)
            opened = OpenVariant(ready.variant, self._inputs(ready), runners, self._load)

            def rates() -> dict[str, Any]:
                measured = opened.rates(counts(self.runtime, share))
                return {"share": share, "rates": {role: own for (_, role), own in measured.items()}}

            self.state.piece(ready.point, "threads", rates)
            self._opened[name] = opened.with_threads(self._threads(ready))
        return self._opened[name]

    def _inputs(self, ready: ReadyPoint) -> Inputs:
        """Return the inputs of a variant by role."""
        data = self.options.data or ready.result.data
        return inputs_of(ready.variant, data, DISTINCT_REQUESTS, self.options.skip_bad)

    def _load(self, variant: VariantFiles, threads: int) -> dict[str, Runner]:
        parts = variant.components.values()
        return loaded(self.runtime, self.folder, parts, self.ops, threads=threads)

    def _threads(self, ready: ReadyPoint) -> Threads:
        """Return what was stored of a variant by number of threads."""
        content = self.state.finished(ready.point, "threads")
        rates = {
            (ready.variant.name, role): {int(count): rate for count, rate in own.items()}
            for role, own in content["rates"].items()
        }
        return Threads(content["share"], rates)

    def _piece(self, ready: ReadyPoint, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Make and store a piece of a point that did not fail; a refusal fails this point alone."""
        if self.state.failure(ready.point) is None:
            try:
                self.state.piece(ready.point, name, make)
            except SaccadeError as error:
                self.state.fail(ready.point, "measure", str(error))

    def measure_in_process(self, advance: Advance) -> None:
        """Measure speed at each batch size, and memory, once per round."""
        for turn in range(self.options.rounds):
            for one in self.ready:
                advance(1, f"{one.variant.name} in process")
                self._piece(one, f"memory-{turn}", partial(self._memory, one))
                self._piece(one, f"in-process-{turn}", partial(self._calls, one))

    def _calls(self, ready: ReadyPoint) -> dict[str, Any]:
        measured = in_process.measure(
            {work.role: work for work in self.opened(ready).works},
            seconds=self.options.window_s * IN_PROCESS_SHARE,
            rounds=1,
            advance=silent,
        )
        return {
            role: {str(size): asdict(calls) for size, calls in load.calls.items()}
            for role, load in measured.items()
        }

    def _memory(self, ready: ReadyPoint) -> dict[str, Any]:
        inputs = {
            role: {name: _file(values[:BATCH]) for name, values in arrays.items()}
            for role, arrays in self.opened(ready).inputs.items()
        }
        task = MemoryTask(str(ready.folder.path), inputs, self.options.runtime, self.ops)
        try:
            with Worker(_MEMORY_PROCESS) as worker:
                return asdict(worker.ask(task, ResidentMemory))
        except WorkerEnded as ended:
            raise SaccadeError(
                f"{ready.variant.name}: the process that loaded it stopped ({ended}): "
                f"{ended.last_words or 'it printed nothing'}. Try again with --retry."
            ) from ended

    def measure_served(self, machine: Machine, advance: Advance) -> None:
        """Measure every variant that is left through a server, once per round."""
        left, rounds = self.left, range(self.options.rounds)
        if all(self.state.read(one.point, f"served-{turn}") for one in left for turn in rounds):
            advance(len(rounds) * len(left))
            return
        with ExitStack() as stack:
            running = self._servers(left, machine, stack)
            for turn in rounds:
                order = np.random.default_rng(self.options.seed + turn).permutation(len(left))
                for one in (left[index] for index in order):
                    advance(1, f"{one.variant.name} through a server")
                    self._piece(one, f"served-{turn}", partial(self._served, running, one, turn))

    def _servers(
        self, left: Sequence[ReadyPoint], machine: Machine, stack: ExitStack
    ) -> dict[str, ServerUnderLoad]:
        """Start one server per precision; if a server does not start, its points fail."""
        running: dict[str, ServerUnderLoad] = {}
        entries = [self.measurement(one, machine, served=False).entry for one in left]
        name, kernels = self.options.runtime, self.ops == "kernels"
        for precision, part in by_precision(self.folder.variants, entries).items():
            try:
                running[precision] = stack.enter_context(
                    server_under_load(self.folder.only(*part), runtime=name, op_library=kernels)
                )
            except ServerFailed as error:
                for one in left:
                    if one.point.precision == precision:
                        self.state.fail(one.point, "measure", str(error))
        return running

    def _served(
        self, running: dict[str, ServerUnderLoad], ready: ReadyPoint, turn: int
    ) -> dict[str, Any]:
        options, server = self.options, running[ready.point.precision]
        streams = served.streams(server.url, self.opened(ready).works, options.concurrency)
        windows, seed = Windows(), options.seed + turn
        server.measure(streams, windows, seconds=options.window_s, seed=seed, advance=silent)
        points = [
            {"role": role, "point": point, **asdict(window)}
            for (_, role, point), (window,) in windows.items()
        ]
        return {"server": server.version, "points": points}

    def measurement(self, ready: ReadyPoint, machine: Machine, *, served: bool) -> Measurement:
        """Return what was stored of all rounds, without batch sizes that one round left out."""
        threads, turns = self._threads(ready), range(self.options.rounds)

        def stored(name: str) -> list[dict[str, Any]]:
            return [self.state.finished(ready.point, f"{name}-{turn}") for turn in turns]

        rounds, inside = stored("in-process"), {}
        for role, first in rounds[0].items():
            key = ready.variant.name, role
            calls = {
                int(size): _joined([Calls(**one[role][size]) for one in rounds])
                for size in first
                if all(size in one[role] for one in rounds)
            }
            inside[role] = InProcessLoad(calls, threads.of(key), threads.rates[key])
        windows: dict[tuple[str, str], list[LoadResult]] = {}
        for one in stored("served") if served else ():
            for point in one["points"]:
                place = point.pop("role"), point.pop("point")
                windows.setdefault(place, []).append(typed(LoadResult, point, "a window: "))
        return Measurement(
            ready.variant, ready.result, inside, machine, self.ops, windows, stored("memory")
        )


def _file(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def _joined(rounds: Sequence[Calls]) -> Calls:
    seconds = [seconds for one in rounds for seconds in one.seconds]
    rates = [round(one.inferences_per_second, 2) for one in rounds]
    return Calls(rounds[0].batch, seconds, sum(one.core_s for one in rounds), rates)
