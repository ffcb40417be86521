# SPDX-License-Identifier: Apache-2.0
"""Where slots begin if a request does not say: drawn by seed and image, as the model's rule says.

Image i of a request with seed s has the generator numpy.random.default_rng([s, i]). From it come
in this order the contents of gaussian slots, uniform positions, and scales; see the rule's keys.
"""

from typing import Any

import numpy as np
from choose import RequestRefused


def initial_state(
    facts: dict[str, Any], images: int, *, seed: int = 0, slots: int | None = None
) -> np.ndarray:
    """The initial states of a request's images.

    Shapes: -> float32 [images k s].
    """
    rule, count = facts["initial_state"], int(slots or facts["slots"])
    generators = (np.random.default_rng([seed, index]) for index in range(images))
    return np.stack([state(rule, rng, count) for rng in generators])


def state(rule: dict[str, Any], rng: np.random.Generator, slots: int) -> np.ndarray:
    """The initial state of one image.

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


def check_slots(facts: dict[str, Any], slots: int) -> None:
    """Learned slots cannot be more than were learned.

    Raises: RequestRefused otherwise.
    """
    rule = facts["initial_state"]
    if rule["kind"] == "learned" and slots > len(rule["slots"]):
        raise RequestRefused(
            f"parameter slots is {slots}, expected 1 to {len(rule['slots'])}, the slots that "
            "were learned"
        )
