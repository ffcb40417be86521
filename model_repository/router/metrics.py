# SPDX-License-Identifier: Apache-2.0
"""The router's metrics on the server's page: outcomes of requests, and where their time went.

The server itself counts a refused request as answered. No label's value comes from a caller.
"""

from outcomes import ANSWERED, FAILED, REFUSALS
from routes import PolicyRoute
from tally import Counter, Tally

REQUESTS = "Requests by outcome"
ANSWERS = "Requests that a variant answered"
REFUSED = "Refused requests by reason; the variant is empty if none had been chosen"
FAILURES = "Requests that failed through no fault of the caller; see the server's log"
WAITING = "Time that a request waited in the router's lane of its variant"
DECODE = "Time to decode the images of one request"
POLICY = "Samples that followed a policy, by the step that answered; not certified: the next failed"
ADAPTIVE = "Requests that adapted to the load, by the variant or policy that was chosen"
MODEL = "Time of the calls of a variant's model for one group of requests"


class Metrics:
    """Counters and histograms of one router."""

    def __init__(
        self,
        model: str,
        variants: list[str],
        policies: tuple[PolicyRoute, ...] = (),
        choices: tuple[str, ...] = (),
    ) -> None:
        """`choices` are the variants and policies of requests that adapt to the load."""
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
