# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the direction of stripes; scored and measured on the same pictures."""

from typing import Any

import numpy as np
from fakes.stripes.data import sha256_of, stripes

from saccade.models.scores.results import EvaluationResult, proportion


def direction(model: Any, options: Any) -> EvaluationResult:
    """Share of right directions."""
    images, labels = stripes("test", options.limit or 64)
    given = {"image": images, "sign": np.ones((len(images), 1), np.float32)}
    right = model.component("")(given)["logits"].argmax(1) == labels
    scores = (proportion("right directions", right),)
    samples = right.astype(np.float64)
    return EvaluationResult(model.name, "direction", "stripes", sha256_of(images), scores, samples)


def load_inputs(
    variant: Any, data: str, count: int, skip_bad: int = 0
) -> dict[str, dict[str, np.ndarray]]:
    """The first test pictures."""
    images, _ = stripes("test", count)
    return {"": {"image": images, "sign": np.ones((count, 1), np.float32)}}
