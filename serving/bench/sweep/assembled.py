# SPDX-License-Identifier: Apache-2.0
"""Assemble the pieces of a finished sweep into entries of the frontier and a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from saccade.core.machine import Machine
from saccade.exporter.artefact.frontier import CostFigure, FrontierEntry, dominators, own_cost
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import Calls, InProcessLoad
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.report_content import Measurement, add_served, content, raw_samples
from saccade.serving.bench.scored import embedding_bytes, entry_of_result
from saccade.serving.bench.served import Place
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bench.sweep.ready import ReadyPoint
from saccade.serving.bench.sweep.state import SweepFolder
from saccade.serving.bench.sweep.turns import in_process_turns, served_results, threads_of

THROUGHPUT, LATENCY, MEMORY, BYTES = "throughput", "latency", "memory", "embedding bytes"


@dataclass(frozen=True)
class Figure:
    """A cost over all rounds, with the lowest and highest value of single rounds."""

    value: float
    least: float
    most: float
    unit: str
    of: str  # what was measured
    rounds: tuple[float, ...] | None = None  # value of each round; None: known exactly


Figures = dict[str, Figure]


def figures(
    ready: ReadyPoint,
    inside: Sequence[Mapping[str, InProcessLoad]],
    served: Mapping[Place, Sequence[LoadResult]],
    memory: Sequence[Mapping[str, int]],
    entry: FrontierEntry,
) -> Figures:
    """Return every cost that was measured, or that follows from the file."""
    figures = {THROUGHPUT: _throughput(entry, inside, served)}
    if latency := _latency(entry, served):
        figures[LATENCY] = latency
    resident = [float(reading["resident_bytes"]) for reading in memory]
    batch = memory[0]["batch"]
    loaded = f"resident in a process that has loaded the variant and answered a batch of {batch}"
    figures[MEMORY] = _figure(float(np.median(resident)), resident, "bytes", loaded)
    if numbers := embedding_bytes(ready.variant.main):
        figures[BYTES] = Figure(numbers, numbers, numbers, "bytes", "of one embedding")
    return figures


def frontiers(
    entries: Sequence[FrontierEntry], costs: Mapping[str, Figures], values: Mapping[str, np.ndarray]
) -> tuple[tuple[FrontierEntry, ...], dict[str, dict[str, str | None]]]:
    """Return the entries with `dominated_by` set, and who dominates each variant by each cost.

    Only costs that all variants have are compared.

    Shapes: values[variant] [n], one value per test sample, in the same order.
    """
    names = [
        name
        for name in (THROUGHPUT, LATENCY, MEMORY, BYTES)
        if all(name in costs[entry.variant] for entry in entries)
    ]
    # All costs together: they share the comparisons of scores, which take most of the time.
    own, *others = dominators(entries, values, [own_cost, *(_cost(name, costs) for name in names)])
    marked = tuple(replace(entry, dominated_by=own[entry.variant]) for entry in entries)
    return marked, dict(zip(names, others, strict=True))


def as_json(
    variant: str, costs: Figures, dominated: Mapping[str, Mapping[str, str | None]]
) -> dict[str, Any]:
    """Return the costs of a variant as in a report."""
    return {
        name: asdict(figure)
        | ({"dominated_by": dominated[name][variant]} if name in dominated else {})
        for name, figure in costs.items()
    }


def _cost(name: str, costs: Mapping[str, Figures]) -> Callable[[FrontierEntry], CostFigure]:
    def cost(entry: FrontierEntry) -> CostFigure:
        figure = costs[entry.variant][name]
        values = (figure.value, *(figure.rounds or ()))
        if name == THROUGHPUT:
            values = tuple(1 / value for value in values)
        return CostFigure(values[0], None if figure.rounds is None else values[1:])

    return cost


def _throughput(
    entry: FrontierEntry,
    inside: Sequence[Mapping[str, InProcessLoad]],
    served: Mapping[Place, Sequence[LoadResult]],
) -> Figure:
    unit, best = "inferences per second", entry.best_batch
    for kind, through in (("concurrency_", "gRPC"), ("router_concurrency_", "the router")):
        points = [point for _, role, point in served if not role and point.startswith(kind)]
        if points:
            point = max(points, key=_clients)
            rates = [_rate(result) for result in served[entry.variant, "", point]]
            where = f"through {through}, clients at a time: {_clients(point)}"
            return _figure(entry.speed, rates, unit, where)
    rates = [round(turn[""].calls[best].inferences_per_second, 2) for turn in inside]
    return _figure(entry.speed, rates, unit, "in process, each variant at its best batch")


def _latency(entry: FrontierEntry, served: Mapping[Place, Sequence[LoadResult]]) -> Figure | None:
    if entry.p95_ms is None:
        return None
    for point, through in (("router_concurrency_1", "the router"), ("concurrency_1", "gRPC")):
        if rounds := served.get((entry.variant, "", point)):
            percentiles = [
                round(float(np.percentile(_latencies(one_round), 95)), 4) for one_round in rounds
            ]
            where = f"95th percentile of a request through {through}, one client"
            return _figure(entry.p95_ms, percentiles, "ms", where)
    return None


def _figure(value: float, rounds: Sequence[float], unit: str, of: str) -> Figure:
    # A quantile of all rounds together may be just outside the range of single rounds.
    return Figure(value, min(value, *rounds), max(value, *rounds), unit, of, tuple(rounds))


def _clients(point: str) -> int:
    return int(point.rpartition("_")[2])


def _rate(result: LoadResult) -> float:
    return round(len(_latencies(result)) / result.seconds, 2)


def _latencies(result: LoadResult) -> Sequence[float]:
    (stream,) = result.streams.values()
    return stream.latencies_ms


def entry_without_server(
    state: SweepFolder, candidate: ReadyPoint, options: SweepOptions, machine: Machine
) -> FrontierEntry:
    """Return the frontier's entry with the measurements without a server."""
    inside = _joined(state, candidate, in_process_turns(state, candidate, options.rounds))
    return entry_of_result(candidate.variant, candidate.result, inside, machine, _ops(options))


def assemble(
    state: SweepFolder, ready: Sequence[ReadyPoint], options: SweepOptions, machine: Machine
) -> tuple[dict[str, Any], tuple[FrontierEntry, ...]]:
    """Return the report, and the frontier's entries with `dominated_by` set."""
    measurements = [_measurement(state, candidate, options, machine) for candidate in ready]
    values = {candidate.variant.name: candidate.result.samples for candidate in ready}
    costs = {one.entry.variant: value for one, value, _ in measurements}
    entries, dominated = frontiers([one.entry for one, _, _ in measurements], costs, values)
    measured = [
        replace(one, entry=entry) for (one, _, _), entry in zip(measurements, entries, strict=True)
    ]
    full = content(measured, options)
    for variant in full["variants"]:
        name = variant["variant"]
        variant["costs"] = as_json(name, costs[name], dominated)
    servers = {version for _, _, version in measurements if version}
    full |= {"machine": machine.to_dict(), "server": ", ".join(sorted(servers)) or None}
    # The date of the last measurement, not of this run: a finished sweep may be repeated.
    full["date"] = datetime.fromtimestamp(state.last_written, UTC).isoformat(timespec="seconds")
    return full, entries


def _measurement(
    state: SweepFolder, candidate: ReadyPoint, options: SweepOptions, machine: Machine
) -> tuple[Measurement, Figures, str]:
    turns = in_process_turns(state, candidate, options.rounds)
    inside = _joined(state, candidate, turns)
    entry = entry_of_result(candidate.variant, candidate.result, inside, machine, _ops(options))
    samples = raw_samples(candidate.result, inside)
    version = ""
    served: Mapping[Place, list[LoadResult]] = {}
    if options.server:
        version, served = served_results(state, candidate, options.rounds)
        entry = replace(entry, grpc=add_served(samples, served))
    memory = [_memory(state, candidate, turn) for turn in range(options.rounds)]
    samples["memory"] = memory
    costs = figures(candidate, turns, served, memory, entry)
    entry = replace(entry, memory_bytes=int(costs["memory"].value))
    return Measurement(candidate.variant, candidate.result, entry, samples), costs, version


def _ops(options: SweepOptions) -> Ops:
    return "kernels" if options.op_library else "bodies"


def _memory(state: SweepFolder, candidate: ReadyPoint, turn: int) -> dict[str, int]:
    content = state.read(candidate.point, f"memory-{turn}")
    assert content is not None
    return content


def _joined(
    state: SweepFolder, candidate: ReadyPoint, turns: Sequence[Mapping[str, InProcessLoad]]
) -> dict[tuple[str, str], InProcessLoad]:
    """Join the rounds; a batch size that one round left out is left out."""
    joined, threads = {}, threads_of(state, candidate)
    for role in turns[0]:
        sizes = [size for size in turns[0][role].calls if all(size in t[role].calls for t in turns)]
        key = candidate.variant.name, role
        calls = {size: _all_calls([turn[role].calls[size] for turn in turns]) for size in sizes}
        joined[key] = InProcessLoad(calls, threads.of(key), threads.rates[key])
    return joined


def _all_calls(calls: Sequence[Calls]) -> Calls:
    seconds = [seconds for one in calls for seconds in one.seconds]
    rounds = [one.inferences_per_second for one in calls]
    return Calls(calls[0].batch, seconds, sum(one.core_s for one in calls), rounds)
