# SPDX-License-Identifier: Apache-2.0
"""A request that follows a policy: rows that a variant is sure of stay, the others go on.

The rows that are left are at any time one ticket in one lane, where they share calls with whatever
else waits there. Each lane sees an ordinary request: its caller, its deadline, its work.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from calls import fail
from choose import RequestRefused
from confidence import confidence
from metrics import Metrics
from outcomes import ANSWERED, CALLER_GONE
from policies import Followed
from routes import Route
from texts import repeated, text_rows
from ticket import Ticket

SCORES = ("logits", "probabilities")
# What all variants answer alike. Embeddings and maps of different variants cannot be compared.
OUTPUTS = (*SCORES, "variant", "variant_sha256", "steps", "certified")
Arrays = dict[str, np.ndarray]


def outputs_of(requested: Sequence[str], *, none_named: bool) -> tuple[str, ...]:
    """The outputs that a request with a policy is answered with.

    `none_named`: the caller named none, for which the server asks for all.

    Raises: RequestRefused naming one that variants cannot share.
    """
    if none_named:
        return OUTPUTS
    if odd := sorted(set(requested) - set(OUTPUTS)):
        raise RequestRefused(
            f"output {odd[0]} cannot be asked for with a policy: the samples of one request may be "
            f"answered by different variants, whose {odd[0]} cannot be compared. Ask for some of "
            f"{', '.join(OUTPUTS)}, or choose one variant by budget"
        )
    return tuple(requested)


class Relay:
    """One request on its way along a chain of variants, answered once no row is left."""

    def __init__(
        self,
        request: Ticket,
        followed: Followed,
        routes: Sequence[Route],
        *,
        offer: Callable[[Ticket, Route], None],
        work: Callable[[Route, int], float],
        metrics: Metrics,
    ) -> None:
        """`routes` are the variants of the chain; `work` is what so many rows are to a lane."""
        self._request, self._sender = request, request.sender
        self._policy, self._strict = followed
        self._routes, self._offer, self._work, self._metrics = routes, offer, work, metrics
        self._scores = [name for name in SCORES if name in request.wanted]
        self._at = 0  # the step that is asked now
        self._open = np.arange(request.rows)  # rows of which no step was sure
        self._arrays: Arrays = {}  # the latest answer to each row
        self._answered_by = np.zeros(request.rows, np.int32)  # the step that it is of
        self._given_up = False  # whether the rows that are left are not certified
        self._over = False

    def start(self) -> None:
        """Put all rows into the lane of the first variant."""
        self._ask(self._request)

    def answered(self, inputs: Arrays, arrays: Arrays) -> None:
        """Go on with the answers to the rows that are left; `inputs` are theirs, decoded."""
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
        """End: the rows that are left keep the answer of the step before, which is not certified.

        Where there is none, or the caller is strict, the refusal is the request's.
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
        for name in self._scores:
            self._keep(name, arrays[name])
        self._answered_by[self._open] = self._at
        step = self._policy.steps[self._at]
        if step.threshold is None:
            self._finish()
            return
        sure = confidence(self._policy.measure, arrays["logits"], step.temperature)
        unsure = ~np.asarray(sure >= step.threshold)
        if not unsure.any():
            self._finish()
            return
        self._open = self._open[unsure]
        self._at += 1
        left = {name: array[unsure] for name, array in inputs.items()}
        size = sum(array.nbytes for array in left.values())
        self._ask(
            self._request._replace(
                inputs=left, arrived_s=time.monotonic(), megapixels=0.0, size=size
            )
        )

    def _keep(self, name: str, answer: np.ndarray) -> None:
        if len(self._open) == self._request.rows:
            self._arrays[name] = answer
            return
        # What a call has answered may be read by other requests, too.
        kept = self._arrays[name].copy()
        kept[self._open] = answer
        self._arrays[name] = kept

    def _ask(self, ticket: Ticket) -> None:
        route, rows = self._routes[self._at], len(self._open)
        self._sender.variant = route.name
        self._offer(
            ticket._replace(
                sender=StepSender(self, self._sender),
                rows=rows,
                wanted=tuple({*self._scores, "logits"}),
                work=self._work(route, rows),
            ),
            route,
        )

    def _finish(self) -> None:
        self._over = True
        self._sender.variant = self._routes[self._at].name
        certified = sure_of(self._request.rows)
        if self._given_up:
            certified = certified.copy()
            certified[self._open] = False
        try:
            named = {**self._arrays, **self._names(), "certified": certified}
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
        ends = zip(self._answered_by.tolist(), certified[:, 0].tolist(), strict=True)
        for (step, covered), rows in Counter(ends).items():
            self._metrics.followed(self._policy.name, step, certified=covered, rows=rows)

    def _names(self) -> Arrays:
        """Who answered each row, and after how many steps."""
        ends = self._answered_by.tolist()
        if len(used := set(ends)) == 1:  # as of requests of one image, which are most
            (end,) = used
            route, rows = self._routes[end], len(ends)
            return {
                "variant": repeated(route.name, rows),
                "variant_sha256": repeated(route.sha256, rows),
                "steps": ended_at(end + 1, rows),
            }
        routes = [self._routes[end] for end in ends]
        return {
            "variant": text_rows([route.name for route in routes]),
            "variant_sha256": text_rows([route.sha256 for route in routes]),
            "steps": self._answered_by[:, None] + np.int32(1),
        }


@lru_cache(maxsize=64)
def sure_of(rows: int) -> np.ndarray:
    """What `certified` is where all rows are: not to be changed.

    Shapes: -> bool [rows 1].
    """
    return np.ones((rows, 1), bool)


@lru_cache(maxsize=256)
def ended_at(steps: int, rows: int) -> np.ndarray:
    """What `steps` is where all rows ended after as many: not to be changed.

    Shapes: -> int32 [rows 1].
    """
    return np.full((rows, 1), steps, np.int32)


class StepSender:
    """Sender of the ticket of one step: what a lane sends to it goes to the request's relay.

    A step ends once; what is sent to it later is not the request's.
    """

    __slots__ = ("_relay", "_response", "_sender")

    def __init__(self, relay: Relay, sender: Any) -> None:
        self._relay: Relay | None = relay
        self._sender, self._response = sender, None

    @property
    def watched(self) -> Any:
        """What `Instrumentation` made of the server's own sender, where it watches."""
        return self._sender.watched

    def answered(self, inputs: Arrays, arrays: Arrays) -> None:
        """Take the answers to the step's rows, whose inputs these are."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.answered(inputs, arrays)

    def send(self, response: Any, flags: int) -> None:
        """Take a refusal; `ended` says which."""
        self._response = response

    def ended(self, outcome: str) -> None:
        """Hand the refusal on."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.refused(self._response, outcome)

    def is_cancelled(self) -> bool:
        """True if the caller has gone."""
        return bool(self._sender.is_cancelled())

    def waited(self, seconds: float) -> None:
        """Count the time that the step waited."""
        self._sender.waited(seconds)

    def decoded(self, seconds: float) -> None:
        """Count the time in which the request's images were decoded."""
        self._sender.decoded(seconds)
