# SPDX-License-Identifier: Apache-2.0
"""The router, which has numpy only, draws the initial slots that the model's own code draws."""

from types import SimpleNamespace

import numpy as np
import pytest
from router_code import family_module, router_module

from saccade.models.slot_attention.initial import initial_states


def test_the_router_draws_by_the_numbers_of_the_request():
    rule = {"kind": "gaussian", "mean": [1.0] * 6, "std": [0.5] * 6, "positions": "uniform",
            "scale_mean": 0.1, "scale_std": 0.2}  # fmt: skip
    component = SimpleNamespace(optional=("initial_state",))
    family = family_module("slot_attention").Family(SimpleNamespace(components={"": component}))
    route = SimpleNamespace(facts={"initial_state": rule, "slots": 5})
    for parameters, expected in (
        ({}, initial_states(rule, 4, 5)),
        ({"seed": 3, "slots": 2, "first_image": 7}, initial_states(rule, 4, 2, seed=3, first=7)),
    ):
        inputs = {"image": None}
        family.fill(route, SimpleNamespace(role="", rows=4, parameters=parameters), inputs)
        np.testing.assert_array_equal(inputs["initial_state"], expected)


@pytest.mark.parametrize(
    ("inputs", "parameters", "found"),
    [
        ({"image", "initial_state"}, {}, "initial_state"),
        ({"image"}, {"slots": 4}, "slots"),
        ({"slots", "positions"}, {}, "positions"),
        ({"image"}, {"seed": 4}, None),
    ],
)
def test_a_policy_is_only_for_slots_that_are_drawn_as_in_the_calibration(inputs, parameters, found):
    family = family_module("slot_attention").Family(SimpleNamespace())
    ticket = SimpleNamespace(inputs=dict.fromkeys(inputs), parameters=parameters)
    if found is None:
        family.check_followed(ticket)
        return
    with pytest.raises(
        router_module("choose").RequestRefused, match=f"found {found} in a request with a policy"
    ):
        family.check_followed(ticket)
