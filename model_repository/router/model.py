# SPDX-License-Identifier: Apache-2.0
"""The router: encoded images in, the answer of the variant that the caller's parameter picks.

`execute` only routes. Each variant has a lane of its own, whose thread decodes, makes one call
for a group of requests and answers each; every failure is the failure of one request.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from choose import RequestRefused, Route, choose, read_routes
from decode import ImageRefused, Wanted, decode
from lane import Lane, Ticket
from PIL import Image

MAX_WAITING = 4 * 64  # requests of a variant: four batches of single images
# Whether the caller still waits is a question to the server: not worth asking at once.
ASK_AFTER_S = 0.05
Decoded = tuple[Ticket, list[np.ndarray]]


class TritonPythonModel:
    """One model name for all variants."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read what `saccade repository` wrote beside this file and open the lanes."""
        # Our own caps come first and say what is allowed.
        Image.MAX_IMAGE_PIXELS = None
        # A lane that decodes holds up `execute` for no longer than this: 5 ms by default.
        sys.setswitchinterval(0.0005)
        self.routes = read_routes(Path(__file__).with_name("routes.json"))
        self.wanted = Wanted.from_dict(self.routes.preprocessing)
        self.lanes = {
            route.name: Lane(
                self._answering(route), group_images=route.run_batch, max_waiting=MAX_WAITING
            )
            for route in self.routes.variants
        }

    def finalize(self) -> None:
        """Answer what is queued."""
        for lane in self.lanes.values():
            lane.close()

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
        route = choose(self.routes, json.loads(request.parameters() or "{}"))
        now, timeout_us = time.monotonic(), request.timeout()
        ticket = Ticket(
            images=pb.get_input_tensor_by_name(request, "image").as_numpy().ravel().tolist(),
            wanted=tuple(request.requested_output_names()),
            sender=sender,
            deadline_s=now + timeout_us / 1e6 if timeout_us else None,
            arrived_s=now,
        )
        if not self.lanes[route.name].offer(ticket):
            refuse(sender, queue_full(route.name), pb.TritonError.UNAVAILABLE)

    def _answering(self, route: Route) -> Callable[[list[Ticket]], None]:
        def answer(group: list[Ticket]) -> None:
            ready = []
            for ticket in group:
                try:
                    ready.append((ticket, self._decode(route, ticket)))
                except Refused as error:
                    refuse(ticket.sender, str(error), error.code)
                except Exception as error:
                    fail(ticket.sender, "an image could not be decoded", error)
            if ready:
                answer_group(route, self.routes.outputs, ready)

        return answer

    def _decode(self, route: Route, ticket: Ticket) -> list[np.ndarray]:
        if ticket.is_late:
            text = f"the request's timeout ran out before variant '{route.name}' was free"
            raise Refused(text, pb.TritonError.UNAVAILABLE)
        if ticket.waited_s > ASK_AFTER_S and ticket.sender.is_cancelled():
            raise Refused("the caller has gone", pb.TritonError.CANCELLED)
        images = []
        for index, data in enumerate(ticket.images):
            try:
                images.append(decode(data, self.wanted))
            except ImageRefused as error:
                where = f"image {index}: " if len(ticket.images) > 1 else ""
                raise Refused(f"{where}{error}", pb.TritonError.INVALID_ARG) from error
        return images


class Refused(Exception):
    """A request's answer where it is not what was asked for: a text and the protocol's code."""

    def __init__(self, message: str, code: Any) -> None:
        super().__init__(message)
        self.code = code


def answer_group(route: Route, outputs: tuple[str, ...], ready: list[Decoded]) -> None:
    """One call for all requests of a group, and an answer to each of them."""
    try:
        arrays = call(route.name, outputs, ready)
    except Refused as error:
        for ticket, _ in ready:
            refuse(ticket.sender, str(error), error.code)
        return
    except Exception as error:
        for ticket, _ in ready:
            fail(ticket.sender, f"variant '{route.name}' could not be called", error)
        return
    start = 0
    for ticket, images in ready:
        rows = slice(start, start + len(images))
        try:
            send(ticket, arrays, rows, route)
        except Exception as error:
            fail(ticket.sender, f"the answer of variant '{route.name}' was lost", error)
        start = rows.stop


def call(variant: str, outputs: tuple[str, ...], ready: list[Decoded]) -> dict[str, np.ndarray]:
    """One call of one variant: what any request of the group wants, by output name."""
    wanted = [name for name in outputs if any(name in ticket.wanted for ticket, _ in ready)]
    # A caller may ask for nothing but the variant's name; the call proves that it answers.
    wanted = wanted or [outputs[0]]
    response = pb.InferenceRequest(
        model_name=variant,
        inputs=[pb.Tensor("image", np.stack([image for _, images in ready for image in images]))],
        requested_output_names=wanted,
        timeout=remaining_us([ticket for ticket, _ in ready]),
    ).exec()
    if response.has_error():
        raise failure(variant, response.error())
    return {name: pb.get_output_tensor_by_name(response, name).as_numpy() for name in wanted}


def remaining_us(tickets: list[Ticket]) -> int:
    """The longest time that a caller of the group still waits; 0 if one waits for ever."""
    deadlines = [ticket.deadline_s for ticket in tickets if ticket.deadline_s is not None]
    if len(deadlines) < len(tickets):
        return 0
    return max(1, int(1e6 * (max(deadlines) - time.monotonic())))


def failure(variant: str, error: Any) -> Refused:
    """What the caller hears of a variant's error; the server's own words stay in its log."""
    # The code of such an error is INTERNAL whatever its cause: only the words tell them apart.
    words = error.message()
    pb.Logger.log_warn(f"variant '{variant}' answered: {words}")
    if "maximum queue size" in words:
        return Refused(queue_full(variant), pb.TritonError.UNAVAILABLE)
    if "timeout" in words.lower():
        text = f"the request's timeout ran out in the queue of variant '{variant}'"
        return Refused(text, pb.TritonError.UNAVAILABLE)
    text = f"variant '{variant}' failed; the server's log says why"
    return Refused(text, pb.TritonError.INTERNAL)


def queue_full(variant: str) -> str:
    """The refusal of a request that would have waited behind four batches."""
    return f"the queue of variant '{variant}' is full; send fewer requests at once, or later"


def send(ticket: Ticket, arrays: dict[str, np.ndarray], rows: slice, route: Route) -> None:
    """A request's own rows of what the variant answered, and the variant's name."""
    tensors = [
        pb.Tensor(name, value[rows]) for name, value in arrays.items() if name in ticket.wanted
    ]
    for name, text in (("variant", route.name), ("variant_sha256", route.sha256)):
        if name in ticket.wanted:
            tensors.append(pb.Tensor(name, repeated(text, rows.stop - rows.start)))
    ticket.sender.send(pb.InferenceResponse(tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@lru_cache(maxsize=256)
def repeated(text: str, count: int) -> np.ndarray:
    """The text once for each image.

    Shapes: -> object [count 1].
    """
    return np.full((count, 1), text.encode(), dtype=object)


def refuse(sender: Any, text: str, code: Any) -> None:
    """Answer with an error; a caller that cannot be reached is nobody's failure but its own."""
    try:
        sender.send(
            pb.InferenceResponse(error=pb.TritonError(text, code)),
            flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
    except Exception as error:
        pb.Logger.log_error(f"an error could not be sent ({text}): {error!r}")


def fail(sender: Any, text: str, error: Exception) -> None:
    """Our own mistake: the reason goes to the log, the caller learns that there was one."""
    pb.Logger.log_error(f"{text}: {error!r}")
    refuse(sender, f"{text}; the server's log says why", pb.TritonError.INTERNAL)
