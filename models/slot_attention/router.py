# SPDX-License-Identifier: Apache-2.0
"""The router's part of slot attention: initial slots for requests that bring none.

They are drawn by seed and image, following the model's rule; see initial.py. `first_image` is for
callers that split their images into requests.
"""

from typing import Any

import numpy as np
from backlog import Ticket
from choose import RequestRefused
from initial import WrongSlots, check_slots, initial_states
from plain_family import PlainFamily, whole
from rand_index import rand_index
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
            try:
                check_slots(route.facts["initial_state"], numbers.get("slots", 1))
            except WrongSlots as error:
                raise RequestRefused(f"parameter {error}") from error
        return numbers

    def of_row(self, parameters: dict[str, Any], row: int) -> dict[str, Any]:
        """Return the parameters that draw the initial slots of one row."""
        return {**parameters, "first_image": parameters.get("first_image", 0) + row}

    def agrees(self, one: np.ndarray, other: np.ndarray, least: float | None) -> bool:
        """Return whether two segmentations agree, however their slots are numbered."""
        owners = (masks.argmax(0).ravel() for masks in (one, other))
        return least is not None and rand_index(*owners) >= least

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
            rule, given = route.facts["initial_state"], ticket.parameters
            inputs[STATE] = initial_states(
                rule,
                ticket.rows,
                int(given.get("slots", route.facts["slots"])),
                seed=given.get("seed", 0),
                first=given.get("first_image", 0),
            )
