# SPDX-License-Identifier: Apache-2.0
"""The router: a request in, the answer of the variant that the caller's parameter picks.

`execute` only routes. Each part of each variant has a lane of its own, whose thread decodes,
makes one call for a group of requests and answers each; every failure is the failure of one
request.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb
from calls import Refused, call, fail, queue_full, refuse, remaining_us
from choose import RequestRefused, choose
from image_decoding import ImageRefused, Wanted, decode
from initial_state import initial_state
from intake import check_axes, count_rows, own_parameters, part_for
from labels import OUTPUTS, Labels
from lane import Lane, Ticket
from limits import check_numbers
from PIL import Image
from routes import Route, read_routes
from texts import text_rows
from waiting import Waiting

MAX_WAITING = 4 * 64  # requests of a variant: four batches of single images
# Whether the caller still waits is a question to the server: not worth asking at once.
ASK_AFTER_S = 0.05
NAMES = ("variant", "variant_sha256")


class Ready(NamedTuple):
    """A request whose inputs are what the model takes."""

    ticket: Ticket
    inputs: dict[str, np.ndarray]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind may share a call: the same inputs of the same shapes."""
        return tuple((name, array.shape[1:]) for name, array in sorted(self.inputs.items()))


class TritonPythonModel:
    """One model name for all variants."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read what `saccade repository` wrote beside this file and open the lanes."""
        # Our own caps come first and say what is allowed.
        Image.MAX_IMAGE_PIXELS = None
        # A lane that decodes holds up `execute` for no longer than this: 5 ms by default.
        sys.setswitchinterval(0.0005)
        folder = Path(__file__).parent
        self.routes = read_routes(folder / "routes.json")
        declared = self.routes.preprocessing
        self.wanted = Wanted.from_dict(declared) if declared else None
        # The search lies beside this file where the model needs it.
        self.captions = import_module("captions") if self.routes.family == "captioner" else None
        self.labels = Labels(folder, self.routes.variants)
        self.waiting = Waiting(args["model_name"])
        self.lanes = {
            (route.name, role): Lane(
                self._answering(route, role), group_rows=route.run_batch, max_waiting=MAX_WAITING
            )
            for route in self.routes.variants
            for role in self.routes.parts_to_ask()
        }

    def finalize(self) -> None:
        """Answer what is queued."""
        for lane in self.lanes.values():
            lane.close()
        self.waiting.close()

    def execute(self, requests: list[Any]) -> None:
        """Put each request into its variant's lane; the answers are sent from there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._route(request, sender)
            except RequestRefused as error:
                refuse(sender, str(error), pb.TritonError.INVALID_ARG)
            except Exception as error:
                fail(sender, "the router could not read the request", error)

    def _route(self, request: Any, sender: Any) -> None:
        parameters = json.loads(request.parameters() or "{}")
        route = choose(self.routes, parameters)
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        role = part_for(self.routes, set(inputs))
        check_axes(inputs, self.routes, role)
        check_numbers(inputs, route.facts)
        now, timeout_us = time.monotonic(), request.timeout()
        ticket = Ticket(
            role=role,
            inputs=inputs,
            rows=count_rows(inputs),
            parameters=own_parameters(self.routes, route, role, set(inputs), parameters),
            wanted=tuple(request.requested_output_names()),
            sender=sender,
            deadline_s=now + timeout_us / 1e6 if timeout_us else None,
            arrived_s=now,
        )
        if not self.lanes[route.name, role].offer(ticket):
            refuse(sender, queue_full(route.name), pb.TritonError.UNAVAILABLE)

    def _answering(self, route: Route, role: str) -> Callable[[list[Ticket]], None]:
        def answer(group: list[Ticket]) -> None:
            self.waiting.add(ticket.waited_s for ticket in group)
            kinds: dict[tuple[Any, ...], list[Ready]] = {}
            for ticket in group:
                try:
                    ready = Ready(ticket, self._prepare(route, ticket))
                    kinds.setdefault(ready.kind, []).append(ready)
                except Refused as error:
                    refuse(ticket.sender, str(error), error.code)
                except Exception as error:
                    fail(ticket.sender, "the inputs could not be prepared", error)
            for mates in kinds.values():
                if self.captions:
                    # A search ends for each request at a time of its own.
                    for each in mates:
                        self._answer_group(route, role, [each])
                else:
                    self._answer_group(route, role, mates)

        return answer

    def _prepare(self, route: Route, ticket: Ticket) -> dict[str, np.ndarray]:
        if ticket.is_late:
            text = f"the request's timeout ran out before variant '{route.name}' was free"
            raise Refused(text, pb.TritonError.UNAVAILABLE)
        if ticket.waited_s > ASK_AFTER_S and ticket.sender.is_cancelled():
            raise Refused("the caller has gone", pb.TritonError.CANCELLED)
        inputs, part = dict(ticket.inputs), self.routes.parts[ticket.role]
        for name in part.encoded:
            inputs[name] = decoded(inputs[name].ravel().tolist(), self.wanted)
        if "initial_state" in part.optional and "initial_state" not in inputs:
            inputs["initial_state"] = initial_state(route.facts, ticket.rows, **ticket.parameters)
        return inputs

    def _answer_group(self, route: Route, role: str, group: list[Ready]) -> None:
        """An answer to each of them, from one call for all where the family allows it."""
        try:
            answers = self._call(route, role, group)
        except Refused as error:
            for each in group:
                refuse(each.ticket.sender, str(error), error.code)
            return
        except Exception as error:
            for each in group:
                text = f"variant '{route.name}' could not be called"
                fail(each.ticket.sender, text, error)
            return
        for each, arrays in zip(group, answers, strict=True):
            try:
                send(each.ticket, arrays, route)
            except Exception as error:
                text = f"the answer of variant '{route.name}' was lost"
                fail(each.ticket.sender, text, error)

    def _call(self, route: Route, role: str, group: list[Ready]) -> list[dict[str, np.ndarray]]:
        """One call of one model, and each request's own rows of what it answered."""
        if self.captions:
            return [
                self.captions.answer(self.routes, route, each.ticket, each.inputs) for each in group
            ]
        outputs, tickets = self.routes.parts[role].outputs, [each.ticket for each in group]
        asked = {name for ticket in tickets for name in ticket.wanted}
        scored = self.labels.known(route, role) and bool(asked & set(OUTPUTS))
        wanted = [name for name in outputs if name in asked or (scored and name == "embedding")]
        # A caller may ask for nothing but the variant's name; the call proves that it answers.
        wanted = wanted or [outputs[0]]
        inputs = {
            name: np.concatenate([each.inputs[name] for each in group]) for name in group[0].inputs
        }
        arrays = call(route.parts[role], inputs, wanted, remaining_us(tickets))
        if scored:
            arrays |= self.labels.scores(route, arrays["embedding"])
        edges = np.cumsum([0] + [ticket.rows for ticket in tickets])
        return [
            {name: value[start:stop] for name, value in arrays.items()}
            for start, stop in pairwise(edges)
        ]


def decoded(files: list[bytes], wanted: Wanted | None) -> np.ndarray:
    """The images of one request.

    Shapes: -> uint8 [b h w c].
    Raises: Refused naming the image.
    """
    images = []
    assert wanted is not None
    for index, data in enumerate(files):
        try:
            images.append(decode(data, wanted))
        except ImageRefused as error:
            where = f"image {index}: " if len(files) > 1 else ""
            raise Refused(f"{where}{error}", pb.TritonError.INVALID_ARG) from error
    return np.stack(images)


def send(ticket: Ticket, arrays: dict[str, np.ndarray], route: Route) -> None:
    """What the request asked for and its part has, and the variant's name."""
    named = dict(zip(NAMES, (route.name, route.sha256), strict=True))
    tensors = [pb.Tensor(name, array) for name, array in arrays.items() if name in ticket.wanted]
    tensors += [
        pb.Tensor(name, repeated(text, ticket.rows))
        for name, text in named.items()
        if name in ticket.wanted
    ]
    ticket.sender.send(pb.InferenceResponse(tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@lru_cache(maxsize=256)
def repeated(text: str, count: int) -> np.ndarray:
    """The text once for each image.

    Shapes: -> uint8 [count bytes].
    """
    return np.repeat(text_rows([text]), count, axis=0)
