# SPDX-License-Identifier: Apache-2.0
"""The router: answers each request with the variant that the request's parameter selects.

`execute` only routes. Each component of each variant has its own lane. The lane's thread decodes
images, makes one call for a group of requests, and answers each request. A failure affects one
request only.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb
from adaptive import Adaptive, Busy
from backlog import Ticket, caller_of, deadline, time_for
from calls import (
    ASK_EVERY_S,
    CallerCheck,
    Refused,
    Reply,
    Sender,
    call,
    fail,
    refuse,
    remaining_us,
)
from choose import (
    Followed,
    RequestRefused,
    Wish,
    all_policies,
    by_quality,
    choose,
    compared,
    policy_of,
    steps_of,
    wish_of,
)
from decoding import decoded, expected_megapixels, megapixels
from forecast import ServerQueue
from image_decoding import ImageInput
from instrumentation import Instrumentation
from lane import INPUTS_LOST, Lane
from metrics import ANSWERED, BUSY, INVALID_REQUEST, TIMEOUT, Metrics
from PIL import Image
from plain_family import (
    OUTPUTS,
    Labels,
    PlainFamily,
    check_axes,
    component_for,
    count_rows,
    family_of,
    repeated,
)
from relay import OUTPUTS as OF_ALL
from relay import Relay, StepSender, count_adapted, marks_of, outputs_of
from routes import Route, Routes, read_routes

NAMES = ("variant", "variant_sha256")
PROBE = "saccade_probe"  # parameter of a request for a report of the lanes, and nothing else
LANES = "saccade_lanes"  # output with that report
EXPIRE_EVERY_S = 0.02
# Most requests have the parameters of an earlier one, which are not read again.
KEPT, KEPT_TEXT = 256, 512  # texts, and characters of one


class Asked(NamedTuple):
    """What the parameters of a request ask for. Requests share it, so nothing may change it."""

    parameters: dict[str, Any]
    wish: Wish | None  # None: exactly what is named must answer
    followed: Followed | None
    route: Route  # the variant that answers, or the first one of the policy


class Ready(NamedTuple):
    """A request whose inputs are ready for the model."""

    ticket: Ticket
    inputs: dict[str, np.ndarray]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of requests that may share a call: equal inputs and shapes."""
        return tuple((name, array.shape[1:]) for name, array in sorted(self.inputs.items()))


class TritonPythonModel:
    """The router as a Python model of the server: one name for all variants."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the files that `saccade repository` wrote next to this one, and open the lanes."""
        # Our own caps apply first, with messages that name the limit.
        Image.MAX_IMAGE_PIXELS = None
        # A decoding lane delays `execute` by at most this time. Python's default is 5 ms.
        sys.setswitchinterval(0.0005)
        folder = Path(__file__).parent
        self.routes = read_routes(folder / "routes.json")
        declared = self.routes.preprocessing
        self.wanted = ImageInput.from_dict(declared) if declared else None
        self.family = family_of(self.routes, folder)
        self.labels = Labels(folder, self.routes.variants)
        policies = all_policies(self.routes)
        self.chains = {policy.name: steps_of(self.routes, policy) for policy in policies}
        self._read_before = lru_cache(KEPT)(self._read)
        variants = [route.name for route in self.routes.variants]
        self.metrics = Metrics(args["model_name"], variants, policies, choices_of(self.routes))
        self.instrumentation = Instrumentation(args["model_name"], unwatched=PROBE)
        self.lanes = {
            (route.name, role): Lane(
                route.name,
                self._answering(route, role),
                group_rows=route.run_batch,
                decode=self._decode if component.encoded else None,
            )
            for route in self.routes.variants
            for role, component in self.family.components().items()
        }
        self.queue = None
        if self.routes.adaptive:
            self.queue = ServerQueue(args["model_name"], self.routes, {PROBE: "lag"}, LANES)
        self.adaptive = Adaptive(self.routes, self.lanes, self._lag_s)
        self.ended = threading.Event()
        threading.Thread(target=self._expire, daemon=True).start()

    def finalize(self) -> None:
        """Answer the queued requests, then stop."""
        self.ended.set()
        if self.queue:
            self.queue.close()
        for lane in self.lanes.values():
            lane.close()
        self.metrics.close()
        self.instrumentation.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Put each request into its variant's lane.

        Returns the refusals, and None for each request that a lane will answer.
        """
        return [self._execute(request) for request in requests]

    def _execute(self, request: Any) -> Any:
        reply = Reply(request.get_response_sender())
        sender = Sender(self.instrumentation.sender(request, reply), self.metrics)
        try:
            self._route(request, sender)
        except RequestRefused as error:
            refuse(sender, str(error), INVALID_REQUEST)
        except Busy as busy:
            refuse(sender, str(busy), BUSY)
        except Exception as error:
            fail(sender, "the router could not read the request", error)
        return reply.executed()

    def _expire(self) -> None:
        while not self.ended.wait(EXPIRE_EVERY_S):
            for lane in self.lanes.values():
                lane.expire()

    def _route(self, request: Any, sender: Sender) -> None:
        text = request.parameters()
        if PROBE in text and PROBE in json.loads(text):
            send_lanes(sender, self.lanes)
            return
        read = self._read_before if len(text) <= KEPT_TEXT else self._read
        parameters, wish, followed, route = read(text)
        sender.variant = route.name
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        role = component_for(self.family.components(), set(tensors))
        if wish and not self._adapts(request, wish, role, route):
            wish = None
            if followed is None:  # `max_latency_ms` then has the meaning that it has without load
                route = choose(self.routes, parameters, self.family.parameters)
        if wish:
            rows = min(tensor.shape()[0] for tensor in tensors.values())
            self.adaptive.check_arrival(wish, role, time_for(request.timeout()), rows)
        inputs = {name: tensor.as_numpy() for name, tensor in tensors.items()}
        check_axes(inputs, self.routes, role)
        self.family.check(inputs, route.facts)
        rows, now = count_rows(inputs), time.monotonic()
        received_s = now - self._lag_s() if wish else now  # by the server, whose clock a caller has
        own = self.family.read(route, role, set(inputs), parameters)
        files = [
            file for name in self.routes.components[role].encoded for file in inputs[name].flat
        ]
        ticket = Ticket(
            role=role,
            inputs=inputs,
            rows=rows,
            parameters=own,
            wanted=wanted_of(request, followed, self.family),
            sender=sender,
            deadline_s=deadline(request.timeout(), received_s),
            arrived_s=now,
            caller=caller_of(request.request_id()),
            work=self.family.work(route, rows, own),
            megapixels=expected_megapixels(files, self.wanted) if self.wanted else 0.0,
            size=sum(map(len, files)) + sum(array.nbytes for array in inputs.values()),
        )
        if wish:
            self._adapt(ticket, wish)
        elif followed is None:
            self._offer(ticket, route)
        else:
            self._follow(ticket, followed)

    def _read(self, text: str) -> Asked:
        """Return what a request's parameters ask for.

        Raises: RequestRefused for parameters that are unknown, invalid or contradict each other.
        """
        parameters, own_names = json.loads(text or "{}"), self.family.parameters
        wish = wish_of(self.routes, parameters, own_names)
        followed = wish.followed if wish else policy_of(self.routes, parameters, own_names)
        if followed is None:
            route = choose(self.routes, {} if wish else parameters, own_names)
        else:
            route = self.chains[followed.policy.name][0]
        return Asked(parameters, wish, followed, route)

    def _lag_s(self) -> float:
        """Return how long requests wait before the router receives them, as far as is known."""
        return self.queue.lag_s if self.queue else 0.0

    def _adapts(self, request: Any, wish: Wish, role: str, route: Route) -> bool:
        """Return whether the answers of different variants to a request can be compared."""
        wanted = set(request.requested_output_names()) - {LANES}
        comparable = wish.followed is not None or wanted <= {*self.family.by_policy, *OF_ALL}
        return comparable and self._decides(role, route)

    def _decides(self, role: str, route: Route) -> bool:
        outputs = self.routes.components[role].outputs
        return self.family.decides in outputs or self.labels.known(route, role)

    def _adapt(self, ticket: Ticket, wish: Wish) -> None:
        """Answer a request in the best way that meets its objective.

        Raises: Busy if there is none.
        """
        candidate, adapted = self.adaptive.choose(wish, ticket)
        ticket = ticket._replace(adapted=adapted)
        if candidate.policy is not None:
            strict = wish.followed is not None and wish.followed.strict
            late_s = None
            if wish.followed is None and self._may_end(candidate.routes):
                late_s = ticket.arrived_s + wish.slo_s
            self._follow(ticket, Followed(candidate.policy, strict), late_s)
            return
        (route,) = candidate.routes
        ticket.sender.variant = route.name
        self.family.check(ticket.inputs, route.facts)
        work = self.family.work(route, ticket.rows, ticket.parameters)
        self._offer(ticket._replace(work=work), route)

    def _may_end(self, chain: tuple[Route, ...]) -> bool:
        """Return whether each variant of a chain may answer without a certificate."""
        adaptive = self.routes.adaptive
        floor = adaptive.floor_budget if adaptive else None
        return floor is None or all(compared(route.budget) >= compared(floor) for route in chain)

    def _follow(
        self, ticket: Ticket, followed: Followed, later_deadline_s: float | None = None
    ) -> None:
        """Start the chain of a policy; see `Relay` for `later_deadline_s`.

        Raises: RequestRefused for a request that no policy covers.
        """
        routes, needed = self.chains[followed.policy.name], self.family.decides
        if not self._decides(ticket.role, routes[0]):
            raise RequestRefused(
                f"inputs {', '.join(sorted(ticket.inputs))}: the answer has no {needed}, which a "
                "policy needs; choose one variant by budget"
            )
        self.family.check_followed(ticket)
        for route in routes[1:]:
            self.family.check(ticket.inputs, route.facts)
        ticket.sender.variant = routes[0].name
        if len(routes) == 1:  # answered as by budget, plus `steps` and `certified`
            self._offer(ticket._replace(policy=followed.policy.name), routes[0])
            return
        relay = Relay(
            ticket,
            followed,
            routes,
            offer=self._offer,
            family=self.family,
            learn=self.adaptive.forecast.learn,
            later_deadline_s=later_deadline_s,
        )
        relay.start()

    def _offer(self, ticket: Ticket, route: Route) -> None:
        self.instrumentation.routed(ticket, route)
        self.lanes[route.name, ticket.role].offer(ticket)

    def _answering(self, route: Route, role: str) -> Callable[[Lane, list[Ticket]], float]:
        def answer(lane: Lane, group: list[Ticket]) -> float:
            self.instrumentation.taken(group)
            kinds: dict[tuple[Any, ...], list[Ready]] = {}
            for ticket in group:
                ticket.sender.waited(ticket.waited_s)
            for ticket in group:
                try:
                    ready = Ready(ticket, self._prepare(route, ticket, lane))
                    kinds.setdefault(ready.kind, []).append(ready)
                except Refused as error:
                    refuse(ticket.sender, str(error), error.reason)
                except Exception as error:
                    fail(ticket.sender, INPUTS_LOST, error)
            apart = [[ready] for mates in kinds.values() for ready in mates]
            groups = list(kinds.values()) if self.family.together else apart
            return sum(self._answer_group(route, role, mates, lane) for mates in groups)

        return answer

    def _prepare(self, route: Route, ticket: Ticket, lane: Lane) -> dict[str, np.ndarray]:
        if ticket.is_late or ticket.waited_s > ASK_EVERY_S:
            CallerCheck(ticket).check(f"before variant '{route.name}' was free")
        self._decode(lane, ticket)
        inputs = dict(ticket.inputs)
        self.family.fill(route, ticket, inputs)
        return inputs

    def _decode(self, lane: Lane, ticket: Ticket) -> None:
        """Replace the image files of a request by their pixels.

        Raises: Refused for a bad image, or if the caller no longer waits.
        """
        for name in self.routes.components[ticket.role].encoded:
            if ticket.inputs[name].dtype != object:
                continue  # decoded ahead, or for an earlier step of a policy
            assert self.wanted is not None
            files = ticket.inputs[name].ravel().tolist()
            with self.instrumentation.decoding(ticket, map(megapixels, files)):
                ticket.inputs[name] = decoded(files, self.wanted, ticket, lane)

    def _answer_group(self, route: Route, role: str, group: list[Ready], lane: Lane) -> float:
        """Answer each request, with one call for all if the family allows it.

        Returns the work that was run.
        """
        group = [ready for ready in group if still_waits(ready.ticket, route)]
        if not group:
            return 0.0
        try:
            began_s = time.monotonic()
            lane.calls()
            with self.instrumentation.calls_for([ready.ticket for ready in group]):
                answers = self._call(route, role, group, lane)
            self.metrics.ran(route.name, time.monotonic() - began_s)
        except Exception as error:
            if len(group) > 1 and may_be_one(error):
                # One bad request may have failed the whole group: run each request alone.
                return sum(self._answer_group(route, role, [ready], lane) for ready in group)
            for ready in group:
                if isinstance(error, Refused):
                    refuse(ready.ticket.sender, str(error), error.reason)
                else:
                    text = f"variant '{route.name}' could not be called"
                    fail(ready.ticket.sender, text, error)
            return 0.0
        for ready, arrays in zip(group, answers, strict=True):
            try:
                send(ready, arrays, route)
            except Exception as error:
                text = f"the answer of variant '{route.name}' was lost"
                fail(ready.ticket.sender, text, error)
        return sum(ready.ticket.work for ready in group)

    def _call(
        self, route: Route, role: str, group: list[Ready], lane: Lane
    ) -> list[dict[str, np.ndarray]]:
        """Make one call of one model, and return each request's rows of the answer."""
        if not self.family.together:
            return [
                self.family.answer(route, request.ticket, request.inputs, lane.step)
                for request in group
            ]
        outputs, tickets = (
            self.routes.components[role].outputs,
            [request.ticket for request in group],
        )
        asked = {name for ticket in tickets for name in ticket.wanted}
        scored = self.labels.known(route, role) and bool(asked & set(OUTPUTS))
        wanted = [name for name in outputs if name in asked or (scored and name == "embedding")]
        # A caller may request the variant's name only; the call still proves that it answers.
        wanted = wanted or [outputs[0]]
        inputs = group[0].inputs
        if len(group) > 1:  # a single request is not copied
            inputs = {
                name: np.concatenate([request.inputs[name] for request in group]) for name in inputs
            }
        arrays = call(route.parts[role], inputs, wanted, remaining_us(tickets))
        lane.step()
        if scored:
            arrays |= self.labels.scores(route, arrays["embedding"])
        edges = accumulate((ticket.rows for ticket in tickets), initial=0)  # NumPy's is slower
        return [
            {name: value[start:stop] for name, value in arrays.items()}
            for start, stop in pairwise(edges)
        ]


def still_waits(ticket: Ticket, route: Route) -> bool:
    """Return whether the caller still waits; if its time is over, refuse the request."""
    if ticket.is_late:
        text = f"the request's timeout ran out before variant '{route.name}' was run"
        refuse(ticket.sender, text, TIMEOUT)
    return not ticket.is_late


def may_be_one(error: Exception) -> bool:
    """Return whether one request may have caused a group's failure.

    It cannot have caused a full queue or a dead process.
    """
    return not isinstance(error, Refused) or error.of_inputs


def wanted_of(request: Any, followed: Followed | None, family: PlainFamily) -> tuple[str, ...]:
    """Return the outputs of a request.

    Raises: RequestRefused for an output that a request with a policy cannot have.
    """
    names = tuple(request.requested_output_names())
    return names if followed is None else outputs_of(names, family, none_named=LANES in names)


def send_lanes(sender: Any, lanes: dict[tuple[str, str], Lane]) -> None:
    """Answer a probe, without waiting in a lane."""
    lane_reports = [
        {"variant": name, "part": role, **lanes[name, role].report()} for name, role in lanes
    ]
    text = np.frombuffer(json.dumps(lane_reports).encode(), np.uint8)
    sender.send(
        pb.InferenceResponse([pb.Tensor(LANES, text[None])]),
        flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )


def send(ready: Ready, arrays: dict[str, np.ndarray], route: Route) -> None:
    """Send the requested outputs that the component has, and the variant's name.

    The outputs of one step of a policy go to the request's relay.
    """
    ticket = ready.ticket
    if isinstance(ticket.sender, StepSender):
        ticket.sender.answered(ready.inputs, arrays)
        return
    named = dict(zip(NAMES, (route.name, route.sha256), strict=True))
    tensors = [pb.Tensor(name, array) for name, array in arrays.items() if name in ticket.wanted]
    tensors += [
        pb.Tensor(name, repeated(text, ticket.rows))
        for name, text in named.items()
        if name in ticket.wanted
    ]
    marks = marks_of(ticket).items()
    tensors += [pb.Tensor(name, array) for name, array in marks if name in ticket.wanted]
    ticket.sender.send(pb.InferenceResponse(tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    ticket.sender.ended(ANSWERED)
    count_adapted(ticket)
    if ticket.policy:
        ticket.sender.metrics.followed(ticket.policy, 0, certified=True, rows=ticket.rows)


def choices_of(routes: Routes) -> tuple[str, ...]:
    """Return the names of all that may answer a request which adapts to the load, if one can."""
    if not (routes.policies or routes.adaptive):
        return ()
    policies = [policy.name for policy in all_policies(routes)]
    return tuple({one.name: None for one in by_quality(routes)} | dict.fromkeys(policies))
