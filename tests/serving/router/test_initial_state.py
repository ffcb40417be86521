# SPDX-License-Identifier: Apache-2.0
"""The router, which has numpy only, draws the initial slots that the model's own code draws."""

from types import SimpleNamespace

import numpy as np
import pytest
from router_code import family_module, router_module

from saccade.models.slot_attention.initial import initial_states


def test_the_router_draws_as_the_model_does():
    drawing = family_module("slot_attention")
    rng = np.random.default_rng(1)
    rules = [
        {"kind": "learned", "slots": rng.normal(size=(5, 6)).tolist()},
        {"kind": "gaussian", "mean": rng.normal(size=6).tolist(), "std": [0.5] * 6},
    ]
    places = [(None, None, None), ("uniform", None, None), ("zero", 0.1, 0.1),
              ("uniform", 0.1, 0.2)]  # fmt: skip
    for rule in rules:
        for positions, mean, std in places:
            whole = {**rule, "positions": positions, "scale_mean": mean, "scale_std": std}
            metadata = {"initial_state": whole, "slots": 5}
            for seed, slots in ((0, 5), (3, 2)):
                np.testing.assert_array_equal(
                    drawing.initial_state(metadata, 4, seed=seed, slots=slots),
                    initial_states(whole, 4, slots, seed=seed),
                )


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
