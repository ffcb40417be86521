# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that are accumulated here and reported to the server every second.

Reporting a number is a message to another process: too expensive per request, cheap once per second
(benchmarks/metrics_cost.py). The server's own histograms need one message per observation. Ours are
counters, one per bucket, with the names and labels of histograms.
"""

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb

EVERY_S = 1.0
# Seconds: from the time to decode a thumbnail to the longest wait in a lane.
BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
Metric = Any


class Counter:
    """One increasing number."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self._new = metric, 0.0

    def add(self, amount: float = 1.0) -> None:
        """Add an amount. The caller holds the tally's lock."""
        self._new += amount

    def take(self) -> list[tuple[Metric, float]]:
        """Return what has to be reported, and forget it."""
        new, self._new = self._new, 0.0
        return [(self._metric, new)] if new else []


class Histogram:
    """Numbers of durations per bucket, with their count and sum."""

    def __init__(self, buckets: list[Metric], count: Metric, total: Metric) -> None:
        self._buckets, self._count, self._total = buckets, count, total
        self._new, self._seconds = [0] * len(buckets), 0.0

    def add(self, seconds: float) -> None:
        """Add one duration. The caller holds the tally's lock."""
        self._new[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def take(self) -> list[tuple[Metric, float]]:
        """Return what has to be reported, and forget it."""
        new, seconds = self._new, self._seconds
        if not any(new):
            return []
        self._new, self._seconds = [0] * len(new), 0.0
        # The widest bucket first: a reader in between never sees a bucket above a wider one.
        within = list(zip(self._buckets, accumulate(new), strict=True))[::-1]
        told = [(self._count, sum(new)), *within, (self._total, seconds)]
        return [(metric, amount) for metric, amount in told if amount]


class Tally:
    """All counters of a model, and the thread that reports them. Hold `lock` to add to them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._families: dict[str, Any] = {}  # keeps families alive: metrics vanish with them
        self._all: list[Counter | Histogram] = []
        self._untold: list[tuple[Metric, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def counter(self, name: str, description: str, **labels: str) -> Counter:
        """Make one series of a counter; the labels' values must come from a fixed set."""
        made = Counter(self._metric(name, description, labels))
        self._all.append(made)
        return made

    def histogram(self, name: str, description: str, **labels: str) -> Histogram:
        """Make one histogram of seconds."""
        edges = [*map(str, BOUNDS), "+Inf"]
        made = Histogram(
            [self._metric(f"{name}_bucket", description, {**labels, "le": le}) for le in edges],
            self._metric(f"{name}_count", description, labels),
            self._metric(f"{name}_sum", description, labels),
        )
        self._all.append(made)
        return made

    def start(self) -> None:
        """Start reporting; all counters have been made."""
        self._thread.start()

    def close(self) -> None:
        """Report the remaining numbers and stop."""
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
            try:
                self._tell()  # what an earlier try left: meanwhile the numbers are added up
                with self.lock:
                    self._untold = [told for each in self._all for told in each.take()]
                self._tell()
            except Exception as error:  # such as missing shared memory: try again the next time
                pb.Logger.log_warn(f"metrics could not be reported: {error!r}")

    def _tell(self) -> None:
        while self._untold:
            metric, amount = self._untold[0]
            metric.increment(amount)
            del self._untold[0]
