# SPDX-License-Identifier: Apache-2.0
"""A request that follows a policy: each row continues until a variant is confident about it.

At any time, the remaining rows are one ticket in one lane, where they share calls with the other
requests that wait there. For a lane it is an ordinary request with a caller, a deadline and work.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb
from allowance import Allowance, loads_of
from backlog import Ticket
from calls import Sender, fail, tensors_of
from chain import Arrays, RequestChain, bytes_of
from choose import Followed
from outcomes import ANSWERED, CALLER_GONE, TIMEOUT
from plain_family import PlainFamily
from routes import Route


class Relay:
    """One request on its way along a chain of variants, answered when no row remains."""

    def __init__(
        self,
        request: Ticket,
        followed: Followed,
        routes: Sequence[Route],
        *,
        offer: Callable[[Ticket, Route], None],
        family: PlainFamily,
        learn: Callable[[str, list[int]], None],
        allowance: Allowance,
        later_deadline_s: float | None = None,
    ) -> None:
        """`routes` are the variants of the chain; `offer` puts a ticket into a variant's lane.

        `learn` receives how many rows ended at each step. `later_deadline_s`: from the second step
        on, the answer of the step before is better than one after this time.
        """
        self._request, self._sender = request, request.sender
        self._policy, self._strict = followed
        self._offer, self._family = offer, family
        self._learn, self._later_deadline_s = learn, later_deadline_s
        self._allowance, self._loads = allowance, loads_of(self._policy, routes)
        self._chain = RequestChain(request, self._policy, routes, family)
        self._over = False

    def start(self) -> None:
        """Put all rows into the lane of the first variant."""
        self._allowance.starts(self._request.caller, self._request.rows)
        self._ask(self._request)

    def answered(self, inputs: Arrays, arrays: Arrays) -> None:
        """Take the answers to the remaining rows; `inputs` are the decoded inputs of these rows."""
        if self._over:
            return
        try:
            self._advance(inputs, arrays)
        except Exception as error:
            if not self._over:
                self._over = True
                name = self._chain.route.name
                fail(self._sender, f"the answer of variant '{name}' was lost", error)

    def refused(self, response: Any, outcome: str) -> None:
        """Finish early: the remaining rows keep the previous step's answer, not certified.

        The whole request is refused if there is no previous step, or if it is strict.
        """
        if self._over:
            return
        if self._chain.at > 0 and not self._strict and outcome != CALLER_GONE:
            self._chain.give_up()
            self._finish()
            return
        self._over = True
        if self._request.sampled and self._chain.at > 0:
            self._request.sampled.ended(None)  # rows that end early alone are more often lost
        try:
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            pb.Logger.log_error(f"a refusal could not be sent: {error!r}")
        self._sender.ended(outcome)

    def _advance(self, inputs: Arrays, arrays: Arrays) -> None:
        unsure = self._chain.take(arrays)
        if not len(unsure):
            self._finish()
            return
        left = self._chain.left(inputs, unsure)
        files = any(array.dtype == object for array in left.values())
        share = len(unsure) / self._request.rows
        limits = (self._request.deadline_s, self._later_deadline_s)
        load = len(unsure) * self._loads[self._chain.at]
        self._ask(
            self._request._replace(
                inputs=left,
                arrived_s=time.monotonic(),
                megapixels=share * self._request.megapixels if files else 0.0,
                size=bytes_of(left),
                deadline_s=min((limit for limit in limits if limit is not None), default=None),
                behind=self._allowance.is_exceeded(self._request.caller, load),
            )
        )

    def _ask(self, ticket: Ticket) -> None:
        route, rows = self._chain.route, len(self._chain.open)
        self._sender.variant = route.name
        self._offer(
            ticket._replace(
                sender=StepSender(self, self._sender),
                rows=rows,
                wanted=self._chain.needed,
                work=self._family.work(route, rows, ticket.parameters),
            ),
            route,
        )

    def _finish(self) -> None:
        self._over = True
        chain, name = self._chain, self._policy.name
        self._sender.variant = chain.route.name
        try:
            response = pb.InferenceResponse(tensors_of(chain.answer()))
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            fail(self._sender, f"the answers of policy '{name}' were lost", error)
            return
        self._sender.ended(TIMEOUT if self._request.is_late else ANSWERED)
        count_adapted(self._request)
        if self._request.sampled:
            self._request.sampled.ended(chain.decided(self._request.sampled.row))
        if not chain.given_up:
            self._learn(name, chain.rows_by_step())
        for (step, covered), rows in chain.rows_by_end().items():
            self._sender.metrics.followed(name, step, certified=covered, rows=rows)


def count_adapted(ticket: Ticket) -> None:
    """Count an answered request, if its answer was adapted to the load."""
    if ticket.adapted:
        ticket.sender.metrics.adapted(ticket.adapted.choice, degraded=ticket.adapted.degraded)


class StepSender(Sender):
    """Sender for the ticket of one step: it passes what a lane sends to the request's relay.

    A step ends once; anything sent later is dropped.
    """

    __slots__ = ("_relay", "_response")

    def __init__(self, relay: Relay, sender: Sender) -> None:
        super().__init__(sender.watched, sender.metrics, sender.variant)
        self._relay: Relay | None = relay
        self._response: Any = None

    def answered(self, inputs: Arrays, arrays: Arrays) -> None:
        """Take the answers to the step's rows, and their inputs."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.answered(inputs, arrays)

    def send(self, response: Any, flags: int) -> None:
        """Take a refusal; `ended` follows with its outcome."""
        self._response = response

    def ended(self, outcome: str) -> None:
        """Pass the refusal to the relay."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.refused(self._response, outcome)
