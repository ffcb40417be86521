# SPDX-License-Identifier: Apache-2.0
"""Everything that was measured of one variant, as in the frontier and in a report.

Through a server, each point was measured once per round: a window of load.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from saccade.core.machine import Machine
from saccade.exporter.artefact.frontier import (
    ROUNDS,
    SECONDS,
    CostFigure,
    FrontierEntry,
    MeasuredScore,
    Ratio,
    dominators,
    own_cost,
)
from saccade.exporter.artefact.manifest import Manifest, VariantFiles
from saccade.exporter.runtimes.runtime import has_custom_ops
from saccade.models.families import entry_of
from saccade.models.scores.results import EvaluationResult, Interval, bootstrap, paired_log_ratio
from saccade.plugins.contract import Ops
from saccade.serving.bench.figures import throughput_of
from saccade.serving.bench.in_process import InProcessLoad
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.options import MeasureOptions
from saccade.serving.bench.report import SCHEMA, VERSION

_BESIDE_THE_SCORE = "top-5"
_USELESS = 100.0  # times between the ends of an interval that is left out
_REPORTED_OPTIONS = ("seconds", "rounds", "concurrency", "seed", "op_library")
THROUGHPUT, LATENCY, MEMORY, BYTES = "throughput", "latency", "memory", "embedding bytes"
Place = tuple[str, str, str]  # variant, role (empty for plain requests), name of the point
Windows = dict[Place, list[LoadResult]]  # one of each round
PointWindows = Mapping[tuple[str, str], Sequence[LoadResult]]  # the same of one variant


@dataclass(frozen=True)
class Figure:
    """A cost over all rounds, with the lowest and highest value of single rounds."""

    value: float
    least: float
    most: float
    unit: str
    of: str  # what was measured
    rounds: tuple[float, ...] | None = None  # value of each round; None: known exactly


@dataclass(frozen=True)
class Measurement:
    """The score of one variant, and its speed and memory in each round.

    `inside` has the calls without a server by role, empty for plain requests. `memory` has the
    readings of processes that loaded the variant.
    """

    variant: VariantFiles
    result: EvaluationResult
    inside: Mapping[str, InProcessLoad]
    machine: Machine
    ops: Ops  # how custom ops run, if it has any
    served: PointWindows = field(default_factory=dict)
    memory: Sequence[Mapping[str, int]] = ()

    @cached_property
    def entry(self) -> FrontierEntry:
        """The variant's entry in the frontier, without `dominated_by`."""
        first = self.result.scores[0]
        interval = first.interval or bootstrap(self.result.samples)
        top5 = [one.value for one in self.result.scores if one.name == _BESIDE_THE_SCORE]
        entry = self.variant.main.variant
        saved = entry_of(entry.family).embedding_saved
        summaries = {role: load.summary() for role, load in self.inside.items()}
        resident = [reading["resident_bytes"] for reading in self.memory]
        return FrontierEntry(
            variant=self.variant.name,
            sha256=self.variant.sha256,
            budget=entry.budget,
            precision=entry.precision,
            runtime=self.machine.runtime,
            device=self.machine.device,
            score=measured_score(self.result, first.value, first.n, interval),
            top5=round(top5[0], 6) if top5 else None,
            in_process=summaries.pop("") | summaries,
            grpc=grpc_of(self.served),
            embedding_bytes=embedding_bytes(self.variant.main) if saved else None,
            memory_bytes=int(np.median(resident)) if resident else None,
            ops=self.ops if has_custom_ops(self.variant.components.values()) else None,
        )

    def to_dict(self, entry: FrontierEntry) -> dict[str, Any]:
        """Return the variant's entry in a report, with the raw samples."""
        files = self.variant.main.variant
        further = [one for one in self.result.scores[1:] if one.name != _BESIDE_THE_SCORE]
        return {
            **asdict(entry),
            "kept": files.kept,
            "total": files.total,
            "unit": files.unit,
            "files": [_file(role, one) for role, one in self.variant.components.items()],
            "scores": [asdict(score) for score in further],
            "samples": self._samples,
        }

    @property
    def _samples(self) -> dict[str, Any]:
        values = self.result.samples
        whole = np.array_equal(values, values.astype(int))
        raws = {role: raw_samples(one, self.served, role) for role, one in self.inside.items()}
        samples = raws.pop("") | raws
        samples["values"] = [int(one) if whole else round(float(one), 6) for one in values]
        return samples | ({"memory": list(self.memory)} if self.memory else {})

    def costs(self, entry: FrontierEntry) -> dict[str, Figure]:
        """Return every cost that was measured in rounds, or that follows from the file."""
        _, where = throughput_of({"grpc": entry.grpc, "in_process": entry.in_process})
        rates, unit = entry.speed_rounds, "inferences per second"
        figures = {THROUGHPUT: _figure(entry.speed, rates, unit, where)}
        for point, through in (("concurrency_1", "gRPC"), ("router_concurrency_1", "the router")):
            if (windows := self.served.get(("", point))) and entry.p95_ms is not None:
                p95 = [round(float(np.percentile(one.only.latencies_ms, 95)), 4) for one in windows]
                what = f"95th percentile of a request through {through}, one client"
                figures[LATENCY] = _figure(entry.p95_ms, p95, "ms", what)
        resident = [float(reading["resident_bytes"]) for reading in self.memory]
        loaded = (
            "resident in a process that has loaded the variant and answered a batch of "
            f"{self.memory[0]['batch']}"
        )
        figures[MEMORY] = _figure(float(np.median(resident)), resident, "bytes", loaded)
        if size := embedding_bytes(self.variant.main):
            figures[BYTES] = Figure(size, size, size, "bytes", "of one embedding")
        return figures


def measured_score(
    result: EvaluationResult, value: float, n: int, interval: Interval
) -> MeasuredScore:
    """Return a value of the result's main score, as the frontier stores it."""
    first, (low, high) = result.scores[0], interval
    return MeasuredScore(
        name=first.name,
        value=round(value, 6),
        higher_is_better=first.higher_is_better,
        unit=first.unit,
        n=n,
        interval=(round(low, 6), round(high, 6)),
        data=result.data,
        data_sha256=result.data_sha256,
    )


def _figure(value: float, rounds: Sequence[float], unit: str, of: str) -> Figure:
    # A quantile of all rounds together may be just outside the range of single rounds.
    return Figure(value, min((value, *rounds)), max((value, *rounds)), unit, of, tuple(rounds))


def _file(role: str, manifest: Manifest) -> dict[str, Any]:
    """Return the cost of a file from its manifest."""
    return {
        "name": manifest.variant.name,
        "role": role,
        "sha256": manifest.file.sha256,
        "file_bytes": manifest.file.total_bytes,
        "parameters": manifest.cost.parameters,
        "multiply_adds": manifest.cost.multiply_adds.total,
        "multiply_adds_by_part": manifest.cost.multiply_adds.by_part,
        "peak_activation_bytes": manifest.cost.peak_activation_bytes,
    }


def embedding_bytes(manifest: Manifest) -> int | None:
    """Return the size of one embedding; None if the variant returns none of a fixed size."""
    spec = next((spec for spec in manifest.outputs if spec.name == "embedding"), None)
    axes = spec.axes.split()[1:] if spec else []
    if spec is None or not all(axis.isdigit() for axis in axes):
        return None
    return math.prod(map(int, axes)) * np.dtype(spec.dtype).itemsize


def windows_of(windows: Windows, name: str) -> dict[tuple[str, str], list[LoadResult]]:
    """Return the windows of one variant or policy, by role and point."""
    return {place[1:]: own for place, own in windows.items() if place[0] == name}


def point_of(windows: Sequence[LoadResult]) -> dict[str, Any]:
    """Return one point of the frontier from the windows of one stream in all rounds."""
    rounds = [window.only.latencies_ms for window in windows]
    latencies = np.concatenate(rounds)
    quantiles = np.percentile(latencies, (50, 95, 99))
    client = sum(window.client_cpu_s for window in windows)
    server = sum(sum(window.server_cpu_s.values()) for window in windows)
    seconds = sum(window.seconds for window in windows)
    rates = [window.rate for window in windows]
    return {
        "inferences_per_second": round(len(latencies) / seconds, 2),
        "inferences_per_second_min": round(min(rates), 2),
        "inferences_per_second_max": round(max(rates), 2),
        ROUNDS: [round(rate, 2) for rate in rates],
        SECONDS: round(seconds, 4),
        **{f"p{q}_ms": round(float(v), 4) for q, v in zip((50, 95, 99), quantiles, strict=True)},
        "requests": len(latencies),
        "client_cpu_share": round(client / max(client + server, 1e-9), 4),
        "core_ms_per_request": round(1e3 * (client + server) / len(latencies), 4),
    }


def rates_of(
    results: Mapping[Place, Sequence[LoadResult]], concurrency: int
) -> dict[str, list[float]]:
    """Return requests per second in each round, of each variant and policy at that concurrency."""
    rates: dict[str, list[float]] = {}
    for kind in ("concurrency", "router_concurrency"):
        for (name, role, point), windows in results.items():
            if not role and point == f"{kind}_{concurrency}":
                rates.setdefault(name, [window.rate for window in windows])
    return rates


def ratio(rates: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return how many times one throughput is the other, by rounds that measured both in turn.

    An interval over two rounds that differ says nothing, such as 0.001 to 4,000, and is left out.
    """
    low, high = np.exp(paired_log_ratio(rates, others))
    times = float(np.exp(np.mean(np.log(np.array(rates) / np.array(others)))))
    known = high < _USELESS * low  # false without an interval
    interval = (round(float(low), 4), round(float(high), 4)) if known else None
    return Ratio(round(times, 4), interval)


def grpc_of(served: PointWindows) -> dict[str, Any] | None:
    """Return the points through a server, as the frontier stores them."""
    summaries: dict[str, Any] = {}
    for (role, point), windows in served.items():
        into = summaries.setdefault(role, {}) if role else summaries
        into[point] = point_of(windows)
    return summaries or None


def raw_samples(inside: InProcessLoad, served: PointWindows, role: str = "") -> dict[str, Any]:
    """Return the seconds of each call by batch size, and the windows through a server."""
    return {
        "in_process_s": {str(size): calls.seconds for size, calls in inside.calls.items()},
        "grpc": {
            point: [
                {
                    "seconds": window.seconds,
                    "latencies_ms": list(window.only.latencies_ms),
                    "client_cpu_s": window.client_cpu_s,
                    "server_cpu_s": window.server_cpu_s,
                    "statistics": window.statistics,
                }
                for window in windows
            ]
            for (own, point), windows in served.items()
            if own == role
        },
    }


def by_cost(
    entries: Sequence[FrontierEntry],
    costs: Mapping[str, Mapping[str, Figure]],
    values: Mapping[str, np.ndarray],
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


def _cost(
    name: str, costs: Mapping[str, Mapping[str, Figure]]
) -> Callable[[FrontierEntry], CostFigure]:
    def cost(entry: FrontierEntry) -> CostFigure:
        figure = costs[entry.variant][name]
        sign = -1 if name == THROUGHPUT else 1  # lower is better
        rounds = figure.rounds and tuple(one**sign for one in figure.rounds)
        return CostFigure(figure.value**sign, rounds)

    return cost


def content(
    measured: Sequence[Measurement],
    entries: Sequence[FrontierEntry],
    options: MeasureOptions,
    server: str | None,
) -> dict[str, Any]:
    """Return the content of report.json."""
    first = measured[0]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": first.variant.main.variant.model,
        "family": first.variant.main.variant.family,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {
            "name": first.result.data,
            "sha256": first.result.data_sha256,
            "split": first.result.split,
            "n": len(first.result.samples),
        },
        "options": {key: getattr(options, key) for key in _REPORTED_OPTIONS},
        "variants": [one.to_dict(entry) for one, entry in zip(measured, entries, strict=True)],
        "machine": first.machine.to_dict(),
        "server": server,
    }
