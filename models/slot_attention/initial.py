# SPDX-License-Identifier: Apache-2.0
"""Initial slots: learned or drawn contents, drawn positions and scales, by a public rule.

The rule is JSON, so that a server can follow it with numpy alone. For image i of a request with
seed s, the generator is numpy.random.default_rng([s, i]). Draws come in this order:

1. contents: if `kind` is gaussian, standard_normal((k, d)) times `std` plus `mean`; if it is
   learned, the first k rows of `slots`, without a draw;
2. positions: if `positions` is uniform, uniform(-1, 1, (k, 2)); if it is zero, zeros without a
   draw; if it is null, slots have no positions;
3. scales: only if `scale_mean` is a number, standard_normal((k, 2)) times `scale_std` plus
   `scale_mean`; the model itself clips initial values.

All is computed in float64, joined in this order along the last axis, and rounded to float32.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.slot_attention.config import SlotConfig

if TYPE_CHECKING:
    import torch

Rule = dict[str, Any]


def rule_of(config: SlotConfig, contents: "dict[str, torch.Tensor]") -> Rule:
    """Return a model's rule as JSON, from its configuration and its initial slots' weights."""
    rule: Rule = {"kind": config.initial_slots}
    for name, value in contents.items():
        rule[name] = value.detach().double().cpu().tolist()
    rule["positions"] = config.initial_positions if config.equivariant else None
    rule["scale_mean"] = config.scale_mean if config.scaled else None
    rule["scale_std"] = config.scale_std if config.scaled else None
    return rule


def initial_state(rule: Rule, rng: np.random.Generator, slots: int) -> np.ndarray:
    """Return the initial state of one image.

    Shapes: -> [k s] float32.
    Raises: SaccadeError if fewer than one slot is requested, or more than were learned.
    """
    most = len(rule["slots"]) if rule["kind"] == "learned" else slots
    if not 1 <= slots <= most:
        expected = f"1 to {most}, the slots that were learned" if slots > most else "at least 1"
        raise SaccadeError(
            f"slots: found {slots}, expected {expected}. Change the number of slots."
        )
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


def initial_states(
    rule: Rule, count: int, slots: int, *, seed: int = 0, first: int = 0
) -> np.ndarray:
    """Return the initial states of images `first` to `first + count - 1` of a request.

    Shapes: -> [count k s] float32.
    Raises: SaccadeError as `initial_state`.
    """
    generators = (np.random.default_rng([seed, first + index]) for index in range(count))
    return np.stack([initial_state(rule, rng, slots) for rng in generators])
