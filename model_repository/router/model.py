# SPDX-License-Identifier: Apache-2.0
"""The router: encoded images in, the answer of the variant that the caller's parameter picks.

`execute` only routes. Each variant has a lane of its own, whose thread decodes, makes one call
for a group of requests and answers each; every failure is the failure of one request.
"""

import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb
from choose import RequestRefused, choose, read_routes
from decode import ImageRefused, Wanted, decode
from lane import Lane, Ticket
from PIL import Image

MAX_BATCH = 64
MAX_WAITING = 4 * MAX_BATCH


class TritonPythonModel:
    """One model name for all variants."""

    def initialize(self, args):
        # Our own caps come first and say what is allowed.
        Image.MAX_IMAGE_PIXELS = None
        self.routes = read_routes(Path(__file__).with_name("routes.json"))
        self.wanted = Wanted.from_dict(self.routes.preprocessing)
        self.lanes = {
            route.name: Lane(
                lambda group, route=route: self.answer(route, group),
                group_images=MAX_BATCH,
                max_waiting=MAX_WAITING,
            )
            for route in self.routes.variants
        }

    def finalize(self):
        for lane in self.lanes.values():
            lane.close()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.route(request, sender)
            except RequestRefused as error:
                refuse(sender, str(error), pb.TritonError.INVALID_ARG)
            except Exception as error:
                fail(sender, "the router could not read the request", error)

    def route(self, request, sender):
        route = choose(self.routes, json.loads(request.parameters() or "{}"))
        now = time.monotonic()
        timeout_us = request.timeout()
        ticket = Ticket(
            images=pb.get_input_tensor_by_name(request, "image").as_numpy().ravel().tolist(),
            wanted=tuple(request.requested_output_names()),
            sender=sender,
            deadline_s=now + timeout_us / 1e6 if timeout_us else None,
            arrived_s=now,
        )
        if not self.lanes[route.name].offer(ticket):
            refuse(
                sender,
                f"the queue of variant '{route.name}' is full; retry later",
                pb.TritonError.UNAVAILABLE,
            )

    def answer(self, route, group):
        """Answer every request of a group that one variant serves."""
        ready = [(ticket, images) for ticket in group if (images := self.decode(route, ticket))]
        if not ready:
            return
        try:
            outputs = call(route.name, self.routes.outputs, ready)
        except VariantFailed as error:
            for ticket, _ in ready:
                refuse(ticket.sender, str(error), error.code)
            return
        except Exception as error:
            for ticket, _ in ready:
                fail(ticket.sender, f"variant '{route.name}' could not be called", error)
            return
        start = 0
        for ticket, images in ready:
            stop = start + len(images)
            try:
                send(ticket, outputs, slice(start, stop), route)
            except Exception as error:
                fail(ticket.sender, f"the answer of variant '{route.name}' was lost", error)
            start = stop

    def decode(self, route, ticket):
        """The request's images as the variant takes them; None if it has been answered already."""
        try:
            if ticket.is_late:
                text = f"the request's timeout ran out before variant '{route.name}' was free"
                refuse(ticket.sender, text, pb.TritonError.UNAVAILABLE)
                return None
            images = []
            for index, data in enumerate(ticket.images):
                try:
                    images.append(decode(data, self.wanted))
                except ImageRefused as error:
                    where = f"image {index}: " if len(ticket.images) > 1 else ""
                    refuse(ticket.sender, f"{where}{error}", pb.TritonError.INVALID_ARG)
                    return None
            return images
        except Exception as error:
            fail(ticket.sender, "an image could not be decoded", error)
            return None


class VariantFailed(Exception):
    """A variant answered with an error; the message names it."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def call(variant, outputs, ready):
    """One call of one variant for all images of a group, as arrays by output name."""
    batch = np.stack([image for _, images in ready for image in images])
    wanted = [name for name in outputs if any(name in ticket.wanted for ticket, _ in ready)]
    if not wanted:
        return {}
    response = pb.InferenceRequest(
        model_name=variant,
        inputs=[pb.Tensor("image", batch)],
        requested_output_names=wanted,
        timeout=remaining_us([ticket for ticket, _ in ready]),
    ).exec()
    if response.has_error():
        raise failure(variant, response.error())
    return {name: pb.get_output_tensor_by_name(response, name).as_numpy() for name in wanted}


def remaining_us(tickets):
    """The longest time that a caller of the group still waits; 0 if one waits for ever."""
    if any(ticket.deadline_s is None for ticket in tickets):
        return 0
    return max(1, int(1e6 * (max(each.deadline_s for each in tickets) - time.monotonic())))


def failure(variant, error):
    """What the caller hears of a variant's error; the server's own words stay in its log."""
    text = error.message()
    pb.Logger.log_warn(f"variant '{variant}' answered: {text}")
    if error.code() == pb.TritonError.UNAVAILABLE and "queue size" in text:
        return VariantFailed(
            f"the queue of variant '{variant}' is full; retry later", pb.TritonError.UNAVAILABLE
        )
    if error.code() == pb.TritonError.UNAVAILABLE and "timeout" in text.lower():
        text = f"the request's timeout ran out in the queue of variant '{variant}'"
        return VariantFailed(text, pb.TritonError.UNAVAILABLE)
    code = (
        pb.TritonError.UNAVAILABLE
        if error.code() == pb.TritonError.UNAVAILABLE
        else pb.TritonError.INTERNAL
    )
    return VariantFailed(f"variant '{variant}' failed; the server's log says why", code)


def send(ticket, outputs, rows, route):
    tensors = [
        pb.Tensor(name, value[rows]) for name, value in outputs.items() if name in ticket.wanted
    ]
    for name, text in (("variant", route.name), ("variant_sha256", route.sha256)):
        if name in ticket.wanted:
            tensors.append(pb.Tensor(name, repeated(text, rows.stop - rows.start)))
    ticket.sender.send(pb.InferenceResponse(tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@lru_cache(maxsize=256)
def repeated(text, count):
    """The text once for each image, shape [count 1]."""
    return np.full((count, 1), text.encode(), dtype=object)


def refuse(sender, text, code):
    sender.send(
        pb.InferenceResponse(error=pb.TritonError(text, code)),
        flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )


def fail(sender, text, error):
    """Our own mistake: the reason goes to the log, the caller learns that there was one."""
    pb.Logger.log_error(f"{text}: {error!r}")
    try:
        refuse(sender, f"{text}; the server's log says why", pb.TritonError.INTERNAL)
    except Exception as second:
        pb.Logger.log_error(f"the error could not be sent either: {second!r}")
