# SPDX-License-Identifier: Apache-2.0
"""Initial slots: learned or drawn contents, drawn positions and scales, by a public rule.

The rule is JSON, and this file needs numpy only: the router runs it too. For image i of a request
with seed s, the generator is numpy.random.default_rng([s, i]). Draws come in this order:

1. contents: if `kind` is gaussian, standard_normal((k, d)) times `std` plus `mean`; if it is
   learned, the first k rows of `slots`, without a draw;
2. positions: if `positions` is uniform, uniform(-1, 1, (k, 2)); if it is zero, zeros without a
   draw; if it is null, slots have no positions;
3. scales: only if `scale_mean` is a number, standard_normal((k, 2)) times `scale_std` plus
   `scale_mean`; the model itself clips initial values.

All is computed in float64, joined in this order along the last axis, and rounded to float32.
"""

from typing import Any

import numpy as np

Rule = dict[str, Any]


class WrongSlots(ValueError):
    """A number of slots that the rule cannot draw; the message names both numbers."""


def check_slots(rule: Rule, slots: int) -> None:
    """Check that no more slots are requested than were learned.

    Raises: WrongSlots if there are more, or none.
    """
    most = len(rule["slots"]) if rule["kind"] == "learned" else slots
    if not 1 <= slots <= most:
        raise WrongSlots(f"slots is {slots}, expected 1 to {most}, the number of learned slots")


def initial_states(
    rule: Rule, count: int, slots: int, *, seed: int = 0, first: int = 0
) -> np.ndarray:
    """Return the initial states of images `first` to `first + count - 1` of a request.

    Shapes: -> [count k s] float32.
    Raises: WrongSlots as `check_slots`.
    """
    check_slots(rule, slots)
    generators = (np.random.default_rng([seed, first + index]) for index in range(count))
    return np.stack([_state(rule, rng, slots) for rng in generators])


def _state(rule: Rule, rng: np.random.Generator, slots: int) -> np.ndarray:
    if rule["kind"] == "learned":
        parts = [np.asarray(rule["slots"])[:slots]]
    else:
        mean, std = np.asarray(rule["mean"]), np.asarray(rule["std"])
        parts = [mean + std * rng.standard_normal((slots, len(mean)))]
    if rule["positions"] == "uniform":
        parts.append(rng.uniform(-1, 1, (slots, 2)))
    elif rule["positions"] == "zero":
        parts.append(np.zeros((slots, 2)))
    if rule["scale_mean"] is not None:
        parts.append(rule["scale_mean"] + rule["scale_std"] * rng.standard_normal((slots, 2)))
    return np.concatenate(parts, axis=-1).astype(np.float32)
