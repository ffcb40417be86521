# SPDX-License-Identifier: Apache-2.0
"""Waiting times in the router's lanes, on the server's own page of metrics.

The server's queue time ends where the router takes a request, which is at once. Telling it a
figure takes a tenth of a millisecond, so that the lanes only add and a thread tells it.
"""

import threading
from collections.abc import Iterable

import triton_python_backend_utils as pb

EVERY_S = 1.0


class Waiting:
    """Two counters of a model: microseconds waited, and requests that no longer wait."""

    def __init__(self, model: str) -> None:
        self._lock = threading.Lock()
        self._waited_us, self._requests = 0.0, 0
        self._ended = threading.Event()
        families = [
            pb.MetricFamily(name=name, description=text, kind=pb.MetricFamily.COUNTER)
            for name, text in (
                ("saccade_waited_us", "Cumulative time requests waited in the router's lanes"),
                ("saccade_waited_requests", "Number of requests that a lane took up"),
            )
        ]
        # A metric goes when its family goes.
        self._families = families
        self._metrics = [family.Metric(labels={"model": model}) for family in families]
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def add(self, waited_s: Iterable[float]) -> None:
        """Requests that are taken up now, and how long each waited."""
        each_us = [1e6 * seconds for seconds in waited_s]
        with self._lock:
            self._waited_us += sum(each_us)
            self._requests += len(each_us)

    def close(self) -> None:
        """Tell the rest."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _tell(self) -> None:
        over = False
        while not over:
            over = self._ended.wait(EVERY_S)
            with self._lock:
                new = (self._waited_us, self._requests)
                self._waited_us, self._requests = 0.0, 0
            if new[1]:
                for metric, value in zip(self._metrics, new, strict=True):
                    metric.increment(value)
