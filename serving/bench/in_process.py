# SPDX-License-Identifier: Apache-2.0
"""Measure the speed of a variant without a server, at several batch sizes."""

import math
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from saccade.core.progress import Advance
from saccade.exporter.artefact.frontier import BY_THREADS, NEARLY, ROUNDS, SECONDS
from saccade.exporter.runtimes.runners import Runner
from saccade.models.interface import Arrays
from saccade.serving.bench.stopping import Deadline, rounds_suffice

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_USUAL_BATCH = 8
LONGEST_CALL_S = 1.0  # if a call takes longer, larger batches are left out
_WARM_S = 0.5  # longer calls are not repeated to warm up
_SAMPLES = 1024  # to measure policies with
_Key = TypeVar("_Key", bound=Hashable)


class Measured(Protocol):
    """A function to measure, and its inputs, [n ...] each."""

    @property
    def title(self) -> str: ...

    @property
    def run(self) -> Runner: ...

    @property
    def inputs(self) -> Arrays: ...

    @property
    def varied(self) -> bool: ...  # each call takes the next inputs, because their costs differ


def timed_rows(count: int, seed: int) -> np.ndarray:
    """Return the samples to measure the speed of policies with, in a random order."""
    return np.random.default_rng(seed).permutation(count)[:_SAMPLES]


@dataclass
class Calls:
    """Durations of equal calls to one session, collected over several rounds.

    Units: seconds per call; core_s is the CPU time of all calls together.
    """

    batch: int
    seconds: list[float] = field(default_factory=list)
    core_s: float = 0.0
    rounds: list[float] = field(default_factory=list)  # inferences per second of each round

    @property
    def inferences_per_second(self) -> float:
        """Samples per second over all calls."""
        return self.batch * len(self.seconds) / sum(self.seconds)

    @property
    def core_ms_per_image(self) -> float:
        """CPU time per sample. Units: milliseconds."""
        return 1e3 * self.core_s / (self.batch * len(self.seconds))

    def summary(self) -> dict[str, Any]:
        """Return throughput and quantiles, as the frontier stores them."""
        quantiles = np.percentile(1e3 * np.asarray(self.seconds), (50, 95, 99))
        names = ("p50_ms", "p95_ms", "p99_ms")
        return {
            "inferences_per_second": round(self.inferences_per_second, 2),
            **{name: round(float(value), 4) for name, value in zip(names, quantiles, strict=True)},
            "calls": len(self.seconds),
            SECONDS: round(sum(self.seconds), 4),
            ROUNDS: list(self.rounds),
        }


def sample(
    run: Runner, inputs: Arrays, calls: Calls, *, seconds: float, varied: bool = False
) -> None:
    """Call `run` with a batch for some seconds, and add the durations to `calls`.

    Every call gets the same batch; with `varied`, the next one, starting after the last call.
    Shapes: inputs [n ...]; a batch repeats them as often as needed.
    """
    first = len(calls.seconds)
    batch = _batch(inputs, calls.batch, first if varied else 0)
    if not calls.seconds or calls.seconds[-1] < _WARM_S:
        run(batch)  # the first call with a shape allocates memory
    core = time.process_time()
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run(batch)
        stop = time.perf_counter()
        calls.seconds.append(round(stop - start, 8))
        if stop >= end:
            break
        if varied:
            batch = _batch(inputs, calls.batch, len(calls.seconds))
    calls.core_s += time.process_time() - core
    own = calls.seconds[first:]
    calls.rounds.append(round(calls.batch * len(own) / sum(own), 2))


def _batch(inputs: Arrays, size: int, index: int) -> dict[str, np.ndarray]:
    rows = np.arange(index * size, (index + 1) * size)
    return {name: array[rows % len(array)] for name, array in inputs.items()}


@dataclass(frozen=True)
class InProcessLoad:
    """Calls of one kind of request without a server, by batch size.

    Units: by_threads in inferences per second, by number of threads.
    """

    calls: dict[int, Calls]
    threads: int = 1
    by_threads: Mapping[int, float] = field(default_factory=dict)

    @property
    def best_batch(self) -> int:
        """The batch size to serve with."""
        return best_batch(self.calls)

    def summary(self) -> dict[str, Any]:
        """Return the figures as the frontier stores them."""
        points = {f"batch_{size}": calls.summary() for size, calls in self.calls.items()}
        rates = {str(count): rate for count, rate in self.by_threads.items()}
        return {
            "threads": self.threads,
            **({BY_THREADS: rates} if rates else {}),
            "best_batch": self.best_batch,
            **points,
        }

    @property
    def rounds(self) -> list[float]:
        """Inferences per second at the best batch size, of each round."""
        return self.calls[self.best_batch].rounds


def best_batch(calls: Mapping[int, Calls]) -> int:
    """Return the batch size nearest to eight among those with nearly the highest throughput.

    A smaller batch costs the server more per request, and a larger one makes requests wait.
    """
    rates = {size: one_calls.inferences_per_second for size, one_calls in calls.items()}
    near = [size for size in rates if rates[size] >= NEARLY * max(rates.values())]
    return min(near, key=lambda size: (abs(math.log2(size / _USUAL_BATCH)), size))


def measure(
    works: Mapping[_Key, Measured],
    *,
    seconds: float,
    rounds: int,
    advance: Advance,
    deadline: Deadline | None = None,
) -> dict[_Key, InProcessLoad]:
    """Measure the speed of each work at each batch size, in turn, until the rounds suffice.

    If a call takes more than a second, larger batches are left out. Without a deadline, all rounds
    are measured.

    Units:  seconds per work, batch size and round.
    """
    calls: dict[_Key, dict[int, Calls]] = {key: {} for key in works}
    for turn in range(rounds):
        for size in BATCHES:
            for key, work in works.items():
                advance(1, f"{work.title} in process, batch {size}")
                if turn == 0 and not _too_slow(calls[key], size):
                    calls[key][size] = Calls(size)
                if size in calls[key]:
                    own = calls[key][size]
                    sample(work.run, work.inputs, own, seconds=seconds, varied=work.varied)
        found = {key: InProcessLoad(one_calls) for key, one_calls in calls.items()}
        rates = {str(key): one.rounds for key, one in found.items()}
        if deadline and rounds_suffice(rates, deadline.left):
            break
    return found


def _too_slow(calls: Mapping[int, Calls], size: int) -> bool:
    smaller = [batch for batch in BATCHES if batch < size]
    if not smaller:
        return False
    return smaller[-1] not in calls or min(calls[smaller[-1]].seconds) > LONGEST_CALL_S
