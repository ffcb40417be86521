# SPDX-License-Identifier: Apache-2.0
"""Measure a sweep turn by turn: every variant once per round, and store each turn.

Variants take turns so that the drift of a shared machine affects all equally. An interrupted sweep
does not repeat a finished turn.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.core.machine import Machine
from saccade.core.progress import Advance, silent
from saccade.core.schema import typed
from saccade.core.worker import Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.tasks import Inputs, inputs_of
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime, loaded, ops_of, runtime_named
from saccade.plugins.contract import Ops
from saccade.serving.bench import in_process, served
from saccade.serving.bench.in_process import Calls, InProcessLoad
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.measurement import Measurement, Windows
from saccade.serving.bench.options import SweepOptions
from saccade.serving.bench.served import ServerUnderLoad, by_precision, server_under_load
from saccade.serving.bench.sweep.memory_process import BATCH, MemoryTask, ResidentMemory
from saccade.serving.bench.sweep.points import ReadyPoint
from saccade.serving.bench.sweep.state import SweepFolder
from saccade.serving.bench.work import OpenVariant, Threads, counts, share_of
from saccade.serving.bench.workload import DISTINCT_REQUESTS, IN_PROCESS_SHARE

_MEMORY_PROCESS = "saccade.serving.bench.sweep.memory_process"


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
        return inputs_of(ready.variant, data, DISTINCT_REQUESTS)

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
