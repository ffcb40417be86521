# SPDX-License-Identifier: Apache-2.0
"""The router's metrics on the server's page: outcomes of requests, and where their time went.

The server itself counts a refused request as answered. No label's value comes from a caller.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb
from outcomes import ANSWERED, CODES, FAILED, REFUSALS
from routes import PolicyRoute

EVERY_S = 1.0
# Seconds: from the time to decode a thumbnail to the longest wait in a lane.
BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
Metric = Any

REQUESTS = "Requests by outcome"
ANSWERS = "Requests that a variant answered"
REFUSED = "Refused requests by reason; the variant is empty if none had been chosen"
FAILURES = "Requests that failed through no fault of the caller; see the server's log"
WAITING = "Time that a request waited in the router's lane of its variant"
DECODE = "Time to decode the images of one request"
POLICY = "Samples that followed a policy, by the step that answered; not certified: the next failed"
ADAPTIVE = "Requests that adapted to the load, by the variant or policy that was chosen"
# Series of the monitor, by the name that it uses.
SAMPLED = "Sampled answers of a policy, by whether the full model's differs"
MONITOR = {
    "same": ("saccade_monitor_answers_total", SAMPLED, {"differs": "false"}),
    "differs": ("saccade_monitor_answers_total", SAMPLED, {"differs": "true"}),
    "seconds": ("saccade_monitor_seconds_total", "Time of the full model for samples", {}),
    "withdrawn": ("saccade_policy_withdrawn_total", "1 once the policy was withdrawn", {}),
}
MODEL = "Time of the calls of a variant's model for one group of requests"


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


class Metrics:
    """Counters and histograms of one router."""

    def __init__(
        self,
        model: str,
        variants: list[str],
        policies: tuple[PolicyRoute, ...] = (),
        choices: tuple[str, ...] = (),
        monitored: Iterable[str] = (),
    ) -> None:
        """`choices` are the variants and policies of requests that adapt to the load.

        `monitored` are the policies whose answers are sampled.
        """
        self._tally = tally = Tally()
        by_outcome = {
            outcome: tally.counter("saccade_requests_total", REQUESTS, model=model, outcome=outcome)
            for outcome in (ANSWERED, "refused", FAILED)
        }
        self._ends = {}
        for variant in ("", *variants):
            labels = {"model": model, "variant": variant}
            of_variant = {FAILED: tally.counter("saccade_failures_total", FAILURES, **labels)}
            if variant:
                of_variant[ANSWERED] = tally.counter("saccade_answers_total", ANSWERS, **labels)
            for reason in REFUSALS if variant else REFUSALS[:1]:
                of_variant[reason] = tally.counter(
                    "saccade_refusals_total", REFUSED, **labels, reason=reason
                )
            for outcome, counter in of_variant.items():
                every = by_outcome.get(outcome, by_outcome["refused"])
                self._ends[variant, outcome] = (counter, every)
        self._waiting, self._decode, self._model = (
            {
                variant: tally.histogram(name, description, model=model, variant=variant)
                for variant in variants
            }
            for name, description in (
                ("saccade_waiting_seconds", WAITING),
                ("saccade_decode_seconds", DECODE),
                ("saccade_model_seconds", MODEL),
            )
        )
        self._followed = {
            (policy.name, at, certified): tally.counter(
                "saccade_policy_answers_total",
                POLICY,
                model=model,
                policy=policy.name,
                step=str(at + 1),
                variant=step.variant,
                certified=str(certified).lower(),
            )
            for policy in policies
            for at, step in enumerate(policy.steps)
            for certified in (True, False)
        }
        self._adapted = _adapted(tally, model, choices)
        self._monitored = {
            (policy, series): tally.counter(name, description, model=model, policy=policy, **labels)
            for policy in monitored
            for series, (name, description, labels) in MONITOR.items()
        }
        tally.start()

    def ended(self, variant: str, outcome: str) -> None:
        """Count an ended request; `variant` is empty if none had been chosen."""
        with self._tally.lock:
            for counter in self._ends[variant, outcome]:
                counter.add()

    def waited(self, variant: str, seconds: float) -> None:
        """Record how long a request waited."""
        with self._tally.lock:
            self._waiting[variant].add(seconds)

    def decoded(self, variant: str, seconds: float) -> None:
        """Record how long it took to decode the images of a request."""
        with self._tally.lock:
            self._decode[variant].add(seconds)

    def ran(self, variant: str, seconds: float) -> None:
        """Record how long a variant's model took to answer a group of requests."""
        with self._tally.lock:
            self._model[variant].add(seconds)

    def followed(self, policy: str, step: int, *, certified: bool, rows: int) -> None:
        """Count the rows of a request that a step of a policy has answered."""
        with self._tally.lock:
            self._followed[policy, step, certified].add(rows)

    def adapted(self, choice: str, *, degraded: bool) -> None:
        """Count an answered request that adapted to the load."""
        with self._tally.lock:
            self._adapted[choice, degraded].add()

    def monitored(self, policy: str, series: str, amount: float = 1.0) -> None:
        """Add to one of the series of `MONITOR`."""
        with self._tally.lock:
            self._monitored[policy, series].add(amount)

    def close(self) -> None:
        """Report the remaining numbers and stop."""
        self._tally.close()


def _adapted(tally: Tally, model: str, choices: tuple[str, ...]) -> dict[tuple[str, bool], Counter]:
    """Return the counters of adapted requests, by choice and degradation."""
    name = "saccade_adaptive_answers_total"
    return {
        (choice, degraded): tally.counter(
            name, ADAPTIVE, model=model, choice=choice, degraded=str(degraded).lower()
        )
        for choice in choices
        for degraded in (True, False)
    }


def code_of(reason: str) -> Any:
    """Return the protocol's code of a refusal or a failure."""
    return getattr(pb.TritonError, CODES[reason])
