# SPDX-License-Identifier: Apache-2.0
"""A request that follows a policy: each row continues until a variant is confident about it.

At any time, the remaining rows are one ticket in one lane, where they share calls with the other
requests that wait there. For a lane it is an ordinary request with a caller, a deadline and work.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from backlog import Ticket
from calls import Sender, fail
from choose import Followed, RequestRefused
from confidence import DECIDES
from metrics import ANSWERED, CALLER_GONE
from plain_family import PlainFamily, repeated, text_rows
from routes import Route

# Outputs of every request with a policy, besides those of the family.
OUTPUTS = ("variant", "variant_sha256", "steps", "certified", "degraded")
Arrays = dict[str, np.ndarray]


def outputs_of(
    requested: Sequence[str], family: PlainFamily, *, none_named: bool
) -> tuple[str, ...]:
    """Return the outputs of a request that follows a policy.

    `none_named`: the caller named no output, so the server requests all.

    Raises: RequestRefused for an output that cannot be compared between variants.
    """
    allowed = (*family.by_policy, *OUTPUTS)
    if none_named:
        return allowed
    if odd := sorted(set(requested) - set(allowed)):
        raise RequestRefused(
            f"found output {odd[0]} in a request with a policy. Different variants may answer the "
            f"samples of one request, and their {odd[0]} cannot be compared. Request only "
            f"{', '.join(allowed)}, or choose one variant by budget"
        )
    return tuple(requested)


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
        later_deadline_s: float | None = None,
    ) -> None:
        """`routes` are the variants of the chain; `offer` puts a ticket into a variant's lane.

        `learn` receives how many rows ended at each step. `later_deadline_s`: from the second step
        on, the answer of the step before is better than one after this time.
        """
        self._request, self._sender = request, request.sender
        self._policy, self._strict = followed
        self._routes, self._offer, self._family = routes, offer, family
        self._learn, self._later_deadline_s = learn, later_deadline_s
        self._kept = [name for name in family.by_policy if name in request.wanted]
        self._at = 0  # the current step
        self._open = np.arange(request.rows)  # rows of which no step was confident
        self._arrays: Arrays = {}  # the latest answer to each row
        self._writable = False  # whether these are the request's own arrays
        self._answered_by = np.zeros(request.rows, np.int32)  # the step that gave it
        self._given_up = False  # whether the remaining rows are not certified
        self._over = False

    def start(self) -> None:
        """Put all rows into the lane of the first variant."""
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
                name = self._routes[self._at].name
                fail(self._sender, f"the answer of variant '{name}' was lost", error)

    def refused(self, response: Any, outcome: str) -> None:
        """Finish early: the remaining rows keep the previous step's answer, not certified.

        The whole request is refused if there is no previous step, or if it is strict.
        """
        if self._over:
            return
        if self._at > 0 and not self._strict and outcome != CALLER_GONE:
            self._given_up = True
            self._at -= 1
            self._finish()
            return
        self._over = True
        try:
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            pb.Logger.log_error(f"a refusal could not be sent: {error!r}")
        self._sender.ended(outcome)

    def _advance(self, inputs: Arrays, arrays: Arrays) -> None:
        self._keep({name: arrays[name] for name in self._kept if name in arrays})
        self._answered_by[self._open] = self._at
        step = self._policy.steps[self._at]
        if step.threshold is None:
            self._finish()
            return
        decides = self._family.decides
        own = DECIDES[decides](self._policy.measure, arrays[decides], step.temperature)
        sure = own >= step.threshold
        if sure.all():
            self._finish()
            return
        unsure = np.flatnonzero(~sure)
        self._open = self._open[unsure]
        self._at += 1
        left = {name: array[unsure] for name, array in inputs.items()}
        size = sum(array.nbytes for array in left.values())
        limits = (self._request.deadline_s, self._later_deadline_s)
        self._ask(
            self._request._replace(
                inputs=left,
                arrived_s=time.monotonic(),
                megapixels=0.0,
                size=size,
                deadline_s=min((limit for limit in limits if limit is not None), default=None),
            )
        )

    def _keep(self, answers: Arrays) -> None:
        if len(self._open) == self._request.rows:
            self._arrays, self._writable = answers, False
            return
        if not self._writable:  # the memory belongs to the answer of a call
            self._arrays = {name: array.copy() for name, array in self._arrays.items()}
            self._writable = True
        for name, answer in answers.items():
            self._arrays[name][self._open] = answer

    def _ask(self, ticket: Ticket) -> None:
        route, rows = self._routes[self._at], len(self._open)
        self._sender.variant = route.name
        self._offer(
            ticket._replace(
                sender=StepSender(self, self._sender),
                rows=rows,
                wanted=tuple({*self._kept, self._family.decides}),
                work=self._family.work(route, rows, ticket.parameters),
            ),
            route,
        )

    def _finish(self) -> None:
        self._over = True
        self._sender.variant = self._routes[self._at].name
        certified = truth(True, self._request.rows)
        if self._given_up:
            certified = certified.copy()
            certified[self._open] = False
        try:
            named = {**self._arrays, **self._names(), "certified": certified}
            named["degraded"] = degraded_of(self._request)
            tensors = [
                pb.Tensor(name, array)
                for name, array in named.items()
                if name in self._request.wanted
            ]
            response = pb.InferenceResponse(tensors)
            self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            fail(self._sender, f"the answers of policy '{self._policy.name}' were lost", error)
            return
        self._sender.ended(ANSWERED)
        count_adapted(self._request)
        if not self._given_up:
            ended = np.bincount(self._answered_by, minlength=len(self._routes))
            self._learn(self._policy.name, ended.tolist())
        ends = zip(self._answered_by.tolist(), certified[:, 0].tolist(), strict=True)
        for (step, covered), rows in Counter(ends).items():
            self._sender.metrics.followed(self._policy.name, step, certified=covered, rows=rows)

    def _names(self) -> Arrays:
        """Return the variant that answered each row, and after how many steps."""
        used = sorted({*self._answered_by.tolist()})
        routes = [self._routes[end] for end in used]
        if len(used) == 1:  # always true for one image, the most frequent request
            rows = self._request.rows
            return {
                "variant": repeated(routes[0].name, rows),
                "variant_sha256": repeated(routes[0].sha256, rows),
                "steps": ended_at(used[0] + 1, rows),
            }
        places = np.searchsorted(used, self._answered_by)
        return {
            "variant": text_rows([route.name for route in routes])[places],
            "variant_sha256": text_rows([route.sha256 for route in routes])[places],
            "steps": self._answered_by[:, None] + np.int32(1),
        }


@lru_cache(maxsize=128)
def truth(value: bool, rows: int) -> np.ndarray:
    """Return the same truth for all rows; do not change the array.

    Shapes: -> bool [rows 1].
    """
    return np.full((rows, 1), value, bool)


def degraded_of(ticket: Ticket) -> np.ndarray:
    """Return `degraded` of a request's answer.

    Shapes: -> bool [rows 1].
    """
    return truth(bool(ticket.adapted and ticket.adapted.degraded), ticket.rows)


def marks_of(ticket: Ticket) -> Arrays:
    """Return what the answer of one variant says about how it was chosen; empty for a budget."""
    if not (ticket.policy or ticket.adapted):
        return {}
    certified = ticket.adapted is None or ticket.adapted.certified
    return {
        "steps": ended_at(1, ticket.rows),
        "certified": truth(certified, ticket.rows),
        "degraded": degraded_of(ticket),
    }


def count_adapted(ticket: Ticket) -> None:
    """Count an answered request, if its answer was adapted to the load."""
    if ticket.adapted:
        ticket.sender.metrics.adapted(ticket.adapted.choice, degraded=ticket.adapted.degraded)


@lru_cache(maxsize=256)
def ended_at(steps: int, rows: int) -> np.ndarray:
    """Return `steps` for rows that all ended after the same number; do not change the array.

    Shapes: -> int32 [rows 1].
    """
    return np.full((rows, 1), steps, np.int32)


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
