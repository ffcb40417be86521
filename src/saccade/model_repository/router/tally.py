# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that are added up here and told to the server every second.

Telling the server a number is a message to another process: too much for each request, nothing
for each second (benchmarks/metrics_cost.py). Its own histograms take a message an observation, so
that ours are counters, a bucket each, by the names and labels that histograms have.
"""

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb

EVERY_S = 1.0
# Of seconds: from decoding a thumbnail to the longest wait in a lane.
BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
Metric = Any


class Counter:
    """One number that grows."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self._new = metric, 0.0

    def add(self, amount: float = 1.0) -> None:
        """Add to it; under the tally's lock."""
        self._new += amount

    def take(self) -> list[tuple[Metric, float]]:
        """What is to be told, which is then no longer kept."""
        new, self._new = self._new, 0.0
        return [(self._metric, new)] if new else []


class Histogram:
    """Durations by their size, with their number and their sum."""

    def __init__(self, buckets: list[Metric], count: Metric, total: Metric) -> None:
        self._buckets, self._count, self._total = buckets, count, total
        self._new, self._seconds = [0] * len(buckets), 0.0

    def add(self, seconds: float) -> None:
        """Add one duration; under the tally's lock."""
        self._new[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def take(self) -> list[tuple[Metric, float]]:
        """What is to be told, which is then no longer kept."""
        new, seconds = self._new, self._seconds
        if not any(new):
            return []
        self._new, self._seconds = [0] * len(new), 0.0
        # The widest bucket first: whoever reads in between finds none larger than a wider one.
        within = list(zip(self._buckets, accumulate(new), strict=True))[::-1]
        told = [(self._count, sum(new)), *within, (self._total, seconds)]
        return [(metric, amount) for metric, amount in told if amount]


class Tally:
    """All counters of a model, and the thread that tells them. `lock` is for those who add."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._families: dict[str, Any] = {}  # a metric goes when its family goes
        self._all: list[Counter | Histogram] = []
        self._untold: list[tuple[Metric, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def counter(self, name: str, description: str, **labels: str) -> Counter:
        """One series of a counter; the labels' values are of a closed list."""
        made = Counter(self._metric(name, description, labels))
        self._all.append(made)
        return made

    def histogram(self, name: str, description: str, **labels: str) -> Histogram:
        """One histogram of seconds."""
        edges = [*map(str, BOUNDS), "+Inf"]
        made = Histogram(
            [self._metric(f"{name}_bucket", description, {**labels, "le": le}) for le in edges],
            self._metric(f"{name}_count", description, labels),
            self._metric(f"{name}_sum", description, labels),
        )
        self._all.append(made)
        return made

    def start(self) -> None:
        """Begin to tell; all counters are there."""
        self._thread.start()

    def close(self) -> None:
        """Tell the rest."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _metric(self, name: str, description: str, labels: dict[str, str]) -> Metric:
        if name not in self._families:
            self._families[name] = pb.MetricFamily(
                name=name, description=description, kind=pb.MetricFamily.COUNTER
            )
        return self._families[name].Metric(labels=labels)

    def _serve(self) -> None:
        over = False
        while not over:
            over = self._ended.wait(EVERY_S)
            with self.lock:
                self._untold += [told for each in self._all for told in each.take()]
            try:
                while self._untold:
                    metric, amount = self._untold[0]
                    metric.increment(amount)
                    del self._untold[0]
            except Exception as error:  # as without shared memory: it is told the next time
                pb.Logger.log_warn(f"metrics could not be told: {error!r}")
