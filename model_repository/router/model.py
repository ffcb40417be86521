# SPDX-License-Identifier: Apache-2.0
"""The router: answers each request with the variant that the request's parameter selects.

`execute` only routes. Each component of each variant has its own lane. The lane's thread decodes
images, makes one call for a group of requests, and answers each request. A failure affects one
request only.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from adaptive import Adaptive, Busy
from allowance import Allowance
from answering import LANES, Answering, Arrays, Ready, answer_of
from backlog import Ticket, caller_of, deadline, time_for
from calls import Reply, Sender, call, fail, refuse, remaining_us, tensors_of
from choose import Candidate, Followed, RequestRefused, Wish, all_policies, by_quality, compared
from decoding import Decoding
from decoding_pool import MOST_MEGAPIXELS, DecodingPool
from forecast import ServerQueue
from instrumentation import Instrumentation
from lane import INPUTS_LOST, Lane
from metrics import Metrics
from monitor import PolicyMonitor
from outcomes import ANSWERED, ASK_EVERY_S, BUSY, INVALID_REQUEST, TIMEOUT, CallerCheck, Refused
from PIL import Image
from relay import Relay, StepSender, count_adapted
from routes import Route, Routes, groups_in_flight

PROBE = "saccade_probe"  # parameter of a request for a report of the lanes, and nothing else
EXPIRE_EVERY_S = 0.02
LONG_CALL_S = 0.1  # another call costs about a millisecond


class TritonPythonModel:
    """The router as a Python model of the server: one name for all variants."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the files that `saccade repository` wrote next to this one, and open the lanes."""
        # Our own caps apply first, with messages that name the limit.
        Image.MAX_IMAGE_PIXELS = None
        # A decoding lane delays `execute` by at most this time. Python's default is 5 ms.
        sys.setswitchinterval(0.0005)
        self.answering = Answering(Path(__file__).parent)
        self.routes, self.family = self.answering.routes, self.answering.family
        self.by_name = {route.name: route for route in self.routes.variants}
        policies = self.answering.policies
        variants = [route.name for route in self.routes.variants]
        self.metrics = Metrics(
            args["model_name"],
            variants,
            policies,
            choices_of(self.routes),
            self.routes.monitor.limits,
        )
        self.instrumentation = Instrumentation(args["model_name"], unwatched=PROBE)
        self.name, routers = args["model_instance_name"], routers_of(args["model_config"])
        cores = len(os.sched_getaffinity(0))
        self.pool = DecodingPool(-(-cores // routers), self._decoding, MOST_MEGAPIXELS / routers)
        self.lanes = {
            (route.name, role): Lane(
                route.name,
                self._answer_of(route, role),
                group_rows=route.run_batch,
                in_flight=groups_in_flight(route.instances, routers),
                decoders=self.pool.threads if component.encoded else 0,
                wake=self.pool.wake,
                ended=self._go_on,
            )
            for route in self.routes.variants
            for role, component in self.family.components().items()
        }
        self.pool.serve(self.lanes.values())
        self.queue = None
        if self.routes.adaptive:
            self.queue = ServerQueue(args["model_name"], self.routes, {PROBE: "lag"}, LANES)
        self.adaptive = Adaptive(self.routes, self.lanes, self._release, self._lag_s)
        self.allowance = Allowance()
        self.monitor = PolicyMonitor(
            self.answering,
            self.lanes,
            self.metrics,
            self._withdraw,
            routers=routers,
            name=self.name,
        )
        self.ended = threading.Event()
        threading.Thread(target=self._expire, daemon=True).start()

    def finalize(self) -> None:
        """Answer the queued requests, then stop."""
        self.ended.set()
        self.monitor.close()
        if self.queue:
            self.queue.close()
        self.adaptive.close()
        for lane in self.lanes.values():
            lane.close()
        self.pool.close()
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
            self.adaptive.expire()
            for lane in self.lanes.values():
                lane.expire()

    def _route(self, request: Any, sender: Sender) -> None:
        text = request.parameters()
        if PROBE in text and PROBE in json.loads(text):
            send_lanes(sender, self.name, self.lanes)
            return
        outputs = tuple(request.requested_output_names())
        choice = self.answering.choice(text, outputs)
        sender.variant = choice.route.name
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        role, choice = self.answering.component(choice, set(tensors), outputs)
        wish, followed = choice.wish, choice.followed
        if wish:
            rows = min(tensor.shape()[0] for tensor in tensors.values())
            self.adaptive.check_arrival(wish, role, time_for(request.timeout()), rows)
        inputs = {name: tensor.as_numpy() for name, tensor in tensors.items()}
        now = time.monotonic()
        received_s = now - self._lag_s() if wish else now  # by the server, whose clock a caller has
        ticket = self.answering.ticket(
            choice,
            role,
            inputs,
            outputs,
            sender=sender,
            deadline_s=deadline(request.timeout(), received_s),
            arrived_s=now,
            caller=caller_of(request.request_id()),
        )
        if wish:
            self.adaptive.offer(wish, ticket)
        elif followed is None:
            self._offer(ticket, choice.route)
        else:
            self._follow(ticket, followed)

    def _lag_s(self) -> float:
        """Return how long requests wait before the router receives them, as far as is known."""
        return self.queue.lag_s if self.queue else 0.0

    def _go_on(self) -> None:
        self.adaptive.go_on()

    def _release(self, candidate: Candidate, wish: Wish, ticket: Ticket) -> None:
        """Pass a request that has waited to the candidate that was chosen for it."""
        try:
            self._adapt(candidate, wish, ticket)
        except RequestRefused as error:
            refuse(ticket.sender, str(error), INVALID_REQUEST)
        except Exception as error:
            fail(ticket.sender, "the router could not pass the request on", error)

    def _adapt(self, candidate: Candidate, wish: Wish, ticket: Ticket) -> None:
        if candidate.policy is not None:
            strict = wish.followed is not None and wish.followed.strict
            late_s = None
            if wish.followed is None and self._may_end(candidate.routes):
                late_s = ticket.arrived_s + wish.slo_s
            self._follow(ticket, Followed(candidate.policy, strict), late_s)
            return
        (route,) = candidate.routes
        ticket.sender.variant = route.name
        self._offer(self.answering.on_route(ticket, route), route)

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
        routes = self.answering.chain(ticket, followed)
        ticket = self.monitor.sampled(ticket, followed.policy)
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
            allowance=self.allowance,
            later_deadline_s=later_deadline_s,
        )
        relay.start()

    def _withdraw(self, policy: str, reason: str) -> None:
        self.answering.withdraw(policy, reason)
        self.adaptive.forget()

    def _offer(self, ticket: Ticket, route: Route) -> None:
        self.instrumentation.routed(ticket, route)
        self.lanes[route.name, ticket.role].offer(ticket)

    def _answer_of(self, route: Route, role: str) -> Callable[[Lane, list[Ticket]], float]:
        def answer(lane: Lane, group: list[Ticket]) -> float:
            self.instrumentation.taken(group)
            kinds: dict[tuple[Any, ...], list[Ready]] = {}
            for ticket in group:
                ticket.sender.waited(ticket.waited_s)
            for ticket in group:
                try:
                    ready = self._prepare(route, ticket, lane)
                    kinds.setdefault(ready.kind, []).append(ready)
                except Refused as error:
                    refuse(ticket.sender, str(error), error.reason)
                except Exception as error:
                    fail(ticket.sender, INPUTS_LOST, error)
            apart = [[ready] for mates in kinds.values() for ready in mates]
            groups = list(kinds.values()) if self.family.together else apart
            return sum(self._answer_group(route, role, mates, lane) for mates in groups)

        return answer

    def _prepare(self, route: Route, ticket: Ticket, lane: Lane) -> Ready:
        if ticket.is_late or ticket.waited_s > ASK_EVERY_S:
            CallerCheck(ticket).check(f"before variant '{route.name}' was free")
        self.answering.decode(route, lane, ticket, self.instrumentation.decoded)
        return self.answering.ready(route, ticket)

    def _decoding(self, lane: Lane, ticket: Ticket) -> Decoding | None:
        route = self.by_name[lane.name]
        return self.answering.decoding(route, lane, ticket, self.instrumentation.decoded)

    def _answer_group(self, route: Route, role: str, group: list[Ready], lane: Lane) -> float:
        """Answer each request, with one call for all if the family allows it.

        Returns the work that was run.
        """
        group = [ready for ready in group if still_waits(ready.ticket, route)]
        if not group:
            return 0.0
        try:
            began_s = time.monotonic()
            with self.instrumentation.calls_for([ready.ticket for ready in group]):
                most_rows = route.run_batch if self.family.together else sys.maxsize
                calling = self._calling(group, lane, most_rows)
                answers = self.answering.answers(route, role, group, calling)
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

    def _calling(
        self, group: list[Ready], lane: Lane, most_rows: int
    ) -> Callable[[str, Arrays, list[str]], Arrays]:
        """Return how to call a model for a group.

        A large request that takes long is run in parts, as the variant would do. It stops if its
        time is over, and others are answered in between.
        """
        tickets = [ready.ticket for ready in group]
        waits = CallerCheck(tickets[0])

        def run(model: str, inputs: Arrays, outputs: list[str]) -> Arrays:
            rows, found = len(next(iter(inputs.values()))), list[Arrays]()
            if rows <= most_rows or lane.pace.run.of(rows) <= LONG_CALL_S:
                answer = call(model, inputs, outputs, remaining_us(tickets))
                lane.step()
                return answer
            edges = np.linspace(0, rows, -(-rows // most_rows) + 1).round().astype(int)
            for start, stop in pairwise(edges.tolist()):
                if found:
                    waits.check(f"when {start} of {rows} rows were run")
                    lane.answer_others(tickets[0], (rows - start) / rows * tickets[0].work)
                part = {name: array[start:stop] for name, array in inputs.items()}
                found.append(call(model, part, outputs, remaining_us(tickets)))
                lane.step()
            return {name: np.concatenate([one[name] for one in found]) for name in outputs}

        return run


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


def routers_of(config: str) -> int:
    """Return how many processes share the requests of this router; `config` is JSON."""
    return sum(group["count"] for group in json.loads(config)["instance_group"])


def send_lanes(sender: Any, router: str, lanes: dict[tuple[str, str], Lane]) -> None:
    """Answer a probe, without waiting in a lane."""
    lane_reports = [
        {"router": router, "variant": name, "part": role, **lane.report()}
        for (name, role), lane in lanes.items()
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
    ticket.sender.send(
        pb.InferenceResponse(tensors_of(answer_of(ticket, arrays, route))),
        flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )
    ticket.sender.ended(TIMEOUT if ticket.is_late else ANSWERED)
    count_adapted(ticket)
    if ticket.sampled:
        ticket.sampled.answered(arrays)
    if ticket.policy:
        ticket.sender.metrics.followed(ticket.policy, 0, certified=True, rows=ticket.rows)


def choices_of(routes: Routes) -> tuple[str, ...]:
    """Return the names of all that may answer a request which adapts to the load, if one can."""
    if not (routes.policies or routes.adaptive):
        return ()
    policies = [policy.name for policy in all_policies(routes)]
    kinds = (routes, routes.of(embeds=True))
    candidates = [one for kind in kinds if kind.variants for one in by_quality(kind)]
    return tuple({one.name: None for one in candidates} | dict.fromkeys(policies))
