# SPDX-License-Identifier: Apache-2.0
"""The router's part of slot attention: initial slots for requests that bring none.

They are drawn by seed and image, following the model's rule.

Image i of a request with seed s has the generator numpy.random.default_rng([s, first_image + i]).
It draws, in this order, the contents of gaussian slots, uniform positions, and scales; see the
rule's keys. `first_image` is for callers that split their images into requests.
"""

from typing import Any

import numpy as np
from backlog import Ticket
from choose import RequestRefused
from plain_family import PlainFamily, whole
from routes import Route

STATE = "initial_state"
DRAWN = ("seed", "slots")  # parameters that draw the state of a request
RANGES = {"seed": (0, 2**31 - 1), "slots": (1, 64), "first_image": (0, 2**31 - 1)}


class Family(PlainFamily):
    """Requests with images, whose slots are drawn, or with slots to paint again."""

    parameters = (*DRAWN, "first_image")
    decides = "masks"
    # All of a slot comes from the same variant, and its order from the initial slots.
    by_policy = ("masks", "slots", "positions", "scales", "attention", "reconstruction")

    def read(
        self, route: Route, role: str, inputs: set[str], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        """Read the seed, the number of slots and the index of the first image.

        Raises: RequestRefused if one is out of range, or the request contains the state itself.
        """
        numbers = {
            name: whole(name, parameters[name], *RANGES[name])
            for name in self.parameters
            if name in parameters
        }
        if drawn := sorted(set(numbers) & set(DRAWN)):
            if role != "" or STATE in inputs:
                raise RequestRefused(
                    f"parameter {drawn[0]} draws the initial state, but the request "
                    f"contains {', '.join(sorted(inputs))}; leave one of them out"
                )
            check_slots(route.facts, numbers.get("slots", 1))
        return numbers

    def check_followed(self, ticket: Ticket) -> None:
        """Check that the slots of the request's images are drawn as in the calibration.

        Raises: RequestRefused for slots of the caller's own, or another number of them.
        """
        unused = sorted({*ticket.inputs} - {"image"}) + ["slots"] * ("slots" in ticket.parameters)
        if unused:
            raise RequestRefused(
                f"found {unused[0]} in a request with a policy, which was certified for images "
                "whose initial slots are drawn, as many as in training. Leave it out, or choose "
                "one variant by budget"
            )

    def fill(self, route: Route, ticket: Ticket, inputs: dict[str, np.ndarray]) -> None:
        """Draw the initial state of a request that contains none."""
        if STATE in self.routes.components[ticket.role].optional and STATE not in inputs:
            inputs[STATE] = initial_state(route.facts, ticket.rows, **ticket.parameters)


def initial_state(
    metadata: dict[str, Any],
    images: int,
    *,
    seed: int = 0,
    slots: int | None = None,
    first_image: int = 0,
) -> np.ndarray:
    """Return the initial states of a request's images.

    Shapes: -> float32 [images k s].
    """
    rule, count = metadata["initial_state"], int(slots or metadata["slots"])
    indices = range(first_image, first_image + images)
    generators = (np.random.default_rng([seed, index]) for index in indices)
    return np.stack([state(rule, rng, count) for rng in generators])


def state(rule: dict[str, Any], rng: np.random.Generator, slots: int) -> np.ndarray:
    """Return the initial state of one image.

    Shapes: -> float32 [k s].
    """
    if rule["kind"] == "learned":
        columns = [np.array(rule["slots"], np.float64)[:slots]]
    else:
        center, width = np.array(rule["mean"]), np.array(rule["std"])
        columns = [center + width * rng.standard_normal((slots, center.size))]
    if rule["positions"] is not None:
        uniform = rule["positions"] == "uniform"
        columns.append(rng.uniform(-1, 1, (slots, 2)) if uniform else np.zeros((slots, 2)))
    if rule["scale_mean"] is not None:
        drawn = rng.standard_normal((slots, 2))
        columns.append(rule["scale_mean"] + rule["scale_std"] * drawn)
    return np.hstack(columns).astype(np.float32)


def check_slots(metadata: dict[str, Any], slots: int) -> None:
    """Check that no more slots are requested than were learned.

    Raises: RequestRefused if there are more.
    """
    rule = metadata["initial_state"]
    if rule["kind"] == "learned" and slots > len(rule["slots"]):
        raise RequestRefused(
            f"parameter slots is {slots}, expected 1 to {len(rule['slots'])}, the number of "
            "learned slots"
        )
