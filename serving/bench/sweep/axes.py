# SPDX-License-Identifier: Apache-2.0
"""What a variant costs, in four ways, each with its spread, and who is on the frontier of each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from saccade.export.artefact.frontier import Entry, dominators, saved
from saccade.export.artefact.manifest import Manifest
from saccade.serving.bench.in_process import InProcess
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.served import Place
from saccade.serving.bench.sweep.ready import Ready

THROUGHPUT, LATENCY, MEMORY, BYTES = "throughput", "latency", "memory", "embedding bytes"


@dataclass(frozen=True)
class Figure:
    """A cost over all rounds, and its least and most of single rounds."""

    value: float
    least: float
    most: float
    unit: str
    of: str  # what was measured


Figures = dict[str, Figure]


def figures(
    ready: Ready,
    inside: Sequence[Mapping[str, InProcess]],
    served: Mapping[Place, Sequence[LoadResult]],
    memory: Sequence[Mapping[str, int]],
    entry: Entry,
) -> Figures:
    """Every cost that was measured, or that the file itself says."""
    found = {THROUGHPUT: _throughput(entry, inside, served)}
    if latency := _latency(entry, served):
        found[LATENCY] = latency
    resident = [float(each["resident_bytes"]) for each in memory]
    batch = memory[0]["batch"]
    holds = f"resident in a process that holds the variant and has answered a batch of {batch}"
    found[MEMORY] = _figure(float(np.median(resident)), resident, "bytes", holds)
    if numbers := embedding_bytes(ready.variant.main):
        found[BYTES] = _figure(numbers, [numbers], "bytes", "of one embedding")
    return found


def frontiers(
    entries: Sequence[Entry], costs: Mapping[str, Figures], values: Mapping[str, np.ndarray]
) -> tuple[tuple[Entry, ...], dict[str, dict[str, str | None]]]:
    """The entries with `dominated_by` set; by cost and variant who dominates it, for each cost
    that all variants have.

    Shapes: values[variant] [n], of each test sample in the same order.
    """
    names = [
        name
        for name in (THROUGHPUT, LATENCY, MEMORY, BYTES)
        if all(name in costs[entry.variant] for entry in entries)
    ]
    # All at once: they share the comparisons of scores, which take the time.
    own, *each = dominators(entries, values, [saved, *(_saving(name, costs) for name in names)])
    marked = tuple(replace(entry, dominated_by=own[entry.variant]) for entry in entries)
    return marked, dict(zip(names, each, strict=True))


def as_json(
    variant: str, costs: Figures, dominated: Mapping[str, Mapping[str, str | None]]
) -> dict[str, Any]:
    """The costs of a variant as they stand in a report."""
    return {
        name: asdict(figure)
        | ({"dominated_by": dominated[name][variant]} if name in dominated else {})
        for name, figure in costs.items()
    }


def embedding_bytes(manifest: Manifest) -> int | None:
    """Of one embedding, where the variant answers with one of a fixed size."""
    spec = next((each for each in manifest.outputs if each.name == "embedding"), None)
    axes = spec.axes.split()[1:] if spec else []
    if spec is None or not all(axis.isdigit() for axis in axes):
        return None
    numbers = math.prod(map(int, axes))
    return numbers * np.dtype(spec.dtype).itemsize


def _saving(name: str, costs: Mapping[str, Figures]) -> Callable[[Entry, Entry], float]:
    sign = -1 if name == THROUGHPUT else 1

    def less(b: Entry, a: Entry) -> float:
        return sign * (costs[a.variant][name].value - costs[b.variant][name].value)

    return less


def _throughput(
    entry: Entry,
    inside: Sequence[Mapping[str, InProcess]],
    served: Mapping[Place, Sequence[LoadResult]],
) -> Figure:
    unit, best = "inferences per second", entry.best_batch
    for kind, through in (("concurrency_", "gRPC"), ("router_concurrency_", "the router")):
        points = [point for _, role, point in served if not role and point.startswith(kind)]
        if points:
            point = max(points, key=_clients)
            rates = [_rate(each) for each in served[entry.variant, "", point]]
            where = f"through {through}, clients at a time: {_clients(point)}"
            return _figure(entry.speed, rates, unit, where)
    rates = [round(turn[""].calls[best].inferences_per_second, 2) for turn in inside]
    return _figure(entry.speed, rates, unit, "in process, each variant at its best batch")


def _latency(entry: Entry, served: Mapping[Place, Sequence[LoadResult]]) -> Figure | None:
    if entry.p95_ms is None:
        return None
    for point, through in (("router_concurrency_1", "the router"), ("concurrency_1", "gRPC")):
        if rounds := served.get((entry.variant, "", point)):
            found = [round(float(np.percentile(_latencies(each), 95)), 4) for each in rounds]
            where = f"95th percentile of a request through {through}, one client"
            return _figure(entry.p95_ms, found, "ms", where)
    return None


def _figure(value: float, rounds: Sequence[float], unit: str, of: str) -> Figure:
    # A quantile of all rounds together may lie just outside those of each.
    return Figure(value, min(value, *rounds), max(value, *rounds), unit, of)


def _clients(point: str) -> int:
    return int(point.rpartition("_")[2])


def _rate(result: LoadResult) -> float:
    return round(len(_latencies(result)) / result.seconds, 2)


def _latencies(result: LoadResult) -> Sequence[float]:
    (stream,) = result.streams.values()
    return stream.latencies_ms
