# SPDX-License-Identifier: Apache-2.0
"""How often the direction of stripes is found; scored and measured on the same pictures."""

from typing import Any

import numpy as np
from fakes.stripes.data import sha256_of, stripes

from saccade.models.scores.results import Found, proportion


def direction(subject: Any, options: Any) -> Found:
    """Share of right directions."""
    images, labels = stripes("test", options.limit or 64)
    given = {"image": images, "sign": np.ones((len(images), 1), np.float32)}
    right = subject.part("")(given)["logits"].argmax(1) == labels
    scores = (proportion("right directions", right),)
    samples = right.astype(np.float64)
    return Found(subject.name, "direction", "stripes", sha256_of(images), scores, samples)


def load_inputs(variant: Any, data: str, count: int) -> dict[str, dict[str, np.ndarray]]:
    """The first test pictures."""
    images, _ = stripes("test", count)
    return {"": {"image": images, "sign": np.ones((count, 1), np.float32)}}
