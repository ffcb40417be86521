# SPDX-License-Identifier: Apache-2.0
"""The router's metrics on the server's page: how requests ended, and where their time went.

To the server itself a refused request is one that was answered. No label's value comes from a
caller.
"""

from outcomes import ANSWERED, FAILED, REFUSALS
from tally import Tally

REQUESTS = "Requests by how they ended"
ANSWERS = "Requests that a variant answered"
REFUSED = "Requests that were refused, by reason; without a variant before one was chosen"
FAILURES = "Requests that failed by no fault of their caller; the server's log says why"
WAITING = "Time that a request waited in the router's lane of its variant"
DECODE = "Time in which the images of one request were decoded"
MODEL = "Time of the calls of a variant's model for one group of requests"


class Metrics:
    """Counters and histograms of one router."""

    def __init__(self, model: str, variants: list[str]) -> None:
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
        tally.start()

    def ended(self, variant: str, outcome: str) -> None:
        """A request has ended; `variant` is empty where none had been chosen."""
        with self._tally.lock:
            for counter in self._ends[variant, outcome]:
                counter.add()

    def waited(self, variant: str, seconds: float) -> None:
        """A request no longer waits."""
        with self._tally.lock:
            self._waiting[variant].add(seconds)

    def decoded(self, variant: str, seconds: float) -> None:
        """The images of a request are decoded."""
        with self._tally.lock:
            self._decode[variant].add(seconds)

    def ran(self, variant: str, seconds: float) -> None:
        """A variant's model has answered a group of requests."""
        with self._tally.lock:
            self._model[variant].add(seconds)

    def close(self) -> None:
        """Tell the rest."""
        self._tally.close()
