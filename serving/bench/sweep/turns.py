# SPDX-License-Identifier: Apache-2.0
"""Measure a sweep turn by turn: every variant once per round, and store each turn.

Variants take turns so that the drift of a shared machine affects all equally. An interrupted sweep
does not repeat a finished turn.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.core.progress import Advance
from saccade.core.worker import Worker, WorkerEnded
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.tasks import inputs_of
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import loaded, ops_of, runtime_named
from saccade.plugins.execution import Ops
from saccade.serving.bench import in_process, served
from saccade.serving.bench.by_threads import Threads, counts, measure_threads, share_of
from saccade.serving.bench.load import LoadResult, StreamResult
from saccade.serving.bench.servers import ServerUnderLoad, by_precision, server_under_load
from saccade.serving.bench.sweep.memory_process import BATCH, MemoryTask, ResidentMemory
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bench.sweep.ready import ReadyPoint
from saccade.serving.bench.sweep.state import SweepFolder
from saccade.serving.bench.work import Work, works_of
from saccade.serving.bench.workload import DISTINCT_REQUESTS, IN_PROCESS_SHARE

_MEMORY_PROCESS = "saccade.serving.bench.sweep.memory_process"


@dataclass(frozen=True)
class Bench:
    """Setup of the measurement."""

    state: SweepFolder
    folder: ArtefactFolder  # artefacts of all points
    ready: Sequence[ReadyPoint]
    options: SweepOptions
    threaded: set[str] = field(default_factory=set)  # variants with the threads to serve with

    @cached_property
    def ops(self) -> Ops:
        """How the custom ops run."""
        manifests = [
            component
            for candidate in self.ready
            for component in candidate.variant.components.values()
        ]
        runtime = runtime_named(self.options.runtime)
        return ops_of(runtime, manifests, kernels=self.options.op_library)

    @cached_property
    def inputs(self) -> dict[str, dict[str, dict[str, np.ndarray]]]:
        """Inputs by variant and role."""
        return {
            candidate.variant.name: inputs_of(
                candidate.variant, self._data(candidate), DISTINCT_REQUESTS
            )
            for candidate in self.ready
        }

    @cached_property
    def works(self) -> dict[str, list[Work]]:
        """Kinds of request by variant, with open sessions of the share of threads."""
        runtime = runtime_named(self.options.runtime)
        share = share_of(self.folder.variants, runtime)
        works = {}
        for candidate in self.ready:
            variant = candidate.variant
            runners = self._load(variant, share)
            works[variant.name] = works_of(variant, self.inputs[variant.name], runners)
        return works

    def measure_threads(self, candidate: ReadyPoint) -> None:
        """Measure a variant by number of threads, once, and open it with the number to serve."""
        variant, works = candidate.variant, self.works[candidate.variant.name]
        if self.state.read(candidate.point, "threads") is None:
            runtime = runtime_named(self.options.runtime)
            share = share_of(self.folder.variants, runtime)
            rates = measure_threads(variant, works, counts(runtime, share), self._load)
            by_role = {role: own for (_, role), own in rates.items()}
            self.state.write(candidate.point, "threads", {"share": share, "rates": by_role})
        threads = threads_of(self.state, candidate)
        for index, work in enumerate(works):
            if (count := threads.of(work.key)) != threads.share:
                runners = self._load(variant, count)
                works[index] = works_of(variant, self.inputs[variant.name], runners)[index]

    def _load(self, variant: VariantFiles, threads: int) -> dict[str, Runner]:
        runtime, components = runtime_named(self.options.runtime), variant.components.values()
        return loaded(runtime, self.folder, components, self.ops, threads=threads)

    def _data(self, candidate: ReadyPoint) -> str:
        return self.options.data or candidate.result.data


def threads_of(state: SweepFolder, candidate: ReadyPoint) -> Threads:
    """Return what was stored of a variant by number of threads."""
    content = state.read(candidate.point, "threads")
    assert content is not None
    rates = {
        (candidate.variant.name, role): {int(count): rate for count, rate in own.items()}
        for role, own in content["rates"].items()
    }
    return Threads(content["share"], rates)


def measure_in_process(bench: Bench, advance: Advance) -> None:
    """Measure speed at each batch size, and memory, once per round; record failures."""
    for turn in range(bench.options.rounds):
        for candidate in bench.ready:
            advance(1, f"{candidate.variant.name} in process")
            if bench.state.failure(candidate.point):
                continue
            try:
                _measure_in_process(bench, candidate, turn)
            except SaccadeError as error:
                bench.state.fail(candidate.point, "measure", str(error))


def _measure_in_process(bench: Bench, candidate: ReadyPoint, turn: int) -> None:
    state, options = bench.state, bench.options
    if state.read(candidate.point, f"memory-{turn}") is None:
        state.write(candidate.point, f"memory-{turn}", _memory(bench, candidate))
    if state.read(candidate.point, f"in-process-{turn}") is not None:
        return
    if candidate.variant.name not in bench.threaded:
        bench.measure_threads(candidate)
        bench.threaded.add(candidate.variant.name)
    measured = in_process.measure(
        {work.role: work for work in bench.works[candidate.variant.name]},
        seconds=options.window_s * IN_PROCESS_SHARE,
        rounds=1,
        advance=lambda *_, **__: None,
    )
    calls = {
        role: {str(size): asdict(one) for size, one in one_role.calls.items()}
        for role, one_role in measured.items()
    }
    state.write(candidate.point, f"in-process-{turn}", calls)


def _memory(bench: Bench, candidate: ReadyPoint) -> dict[str, Any]:
    inputs = {
        role: {name: _file(values[:BATCH]) for name, values in arrays.items()}
        for role, arrays in bench.inputs[candidate.variant.name].items()
    }
    task = MemoryTask(str(candidate.folder.path), inputs, bench.options.runtime, bench.ops)
    try:
        with Worker(_MEMORY_PROCESS) as worker:
            return asdict(worker.ask(task, ResidentMemory))
    except WorkerEnded as ended:
        raise SaccadeError(
            f"{candidate.variant.name}: the process that loaded it stopped ({ended}): "
            f"{ended.last_words or 'it printed nothing'}. Try again with --retry."
        ) from ended


def _file(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()


def in_process_turns(
    state: SweepFolder, candidate: ReadyPoint, rounds: int
) -> list[dict[str, in_process.InProcessLoad]]:
    """Return the stored samples of each round, by role."""
    turns = []
    for turn in range(rounds):
        content = state.read(candidate.point, f"in-process-{turn}")
        assert content is not None
        turns.append(
            {
                role: in_process.InProcessLoad(
                    {int(size): in_process.Calls(**calls) for size, calls in sizes.items()}
                )
                for role, sizes in content.items()
            }
        )
    return turns


def measure_served(bench: Bench, entries: Sequence[FrontierEntry], advance: Advance) -> None:
    """Measure every variant through a server, once per round; record failures."""
    options, state = bench.options, bench.state
    if all(_served_turns(state, candidate, options.rounds) for candidate in bench.ready):
        advance(options.rounds * len(bench.ready))
        return
    with ExitStack() as stack:
        running = _servers(bench, entries, stack)
        for turn in range(options.rounds):
            order = np.random.default_rng(options.seed + turn).permutation(len(bench.ready))
            for candidate in (bench.ready[index] for index in order):
                advance(1, f"{candidate.variant.name} through a server")
                if state.failure(candidate.point) or state.read(candidate.point, f"served-{turn}"):
                    continue
                try:
                    result = _served(bench, running[candidate.point.precision], candidate, turn)
                except ServerFailed as error:
                    state.fail(candidate.point, "measure", str(error))
                    continue
                state.write(candidate.point, f"served-{turn}", result)


def _servers(
    bench: Bench, entries: Sequence[FrontierEntry], stack: ExitStack
) -> dict[str, ServerUnderLoad]:
    """Start one server per precision; if a server does not start, its points fail."""
    running: dict[str, ServerUnderLoad] = {}
    name, kernels = bench.options.runtime, bench.ops == "kernels"
    for precision, folder in by_precision(bench.folder, entries).items():
        try:
            running[precision] = stack.enter_context(
                server_under_load(folder, runtime=name, op_library=kernels)
            )
        except ServerFailed as error:
            for candidate in bench.ready:
                if candidate.point.precision == precision:
                    bench.state.fail(candidate.point, "measure", str(error))
    return running


def _served(
    bench: Bench, server: ServerUnderLoad, candidate: ReadyPoint, turn: int
) -> dict[str, Any]:
    options = bench.options
    streams = served.streams(server.url, bench.works[candidate.variant.name], options.concurrency)
    results = server.measure(
        streams,
        seconds=options.window_s,
        seed=options.seed + turn,
        advance=lambda *_, **__: None,
    )
    return {
        "server": server.version,
        "points": [
            {"role": role, "point": point, **asdict(result)}
            for (_, role, point), result in results.items()
        ],
    }


def _served_turns(state: SweepFolder, candidate: ReadyPoint, rounds: int) -> bool:
    return all(state.read(candidate.point, f"served-{turn}") for turn in range(rounds))


def served_results(
    state: SweepFolder, candidate: ReadyPoint, rounds: int
) -> tuple[str, Mapping[served.Place, list[LoadResult]]]:
    """Return the server's version, and every round of each point."""
    results: dict[served.Place, list[LoadResult]] = {}
    version = ""
    for turn in range(rounds):
        content = state.read(candidate.point, f"served-{turn}")
        assert content is not None
        version = content["server"]
        for one in content["points"]:
            place = candidate.variant.name, one.pop("role"), one.pop("point")
            streams = {name: StreamResult(**seen) for name, seen in one.pop("streams").items()}
            results.setdefault(place, []).append(LoadResult(streams=streams, **one))
    return version, results
