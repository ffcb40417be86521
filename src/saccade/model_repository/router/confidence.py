# SPDX-License-Identifier: Apache-2.0
"""How sure a variant is of its answer: the figure by which a chain of variants decides to stop.

The router runs this file, and `saccade calibrate` imports it, so that both compare the same
numbers with a threshold. NumPy only.
"""

from collections.abc import Callable

import numpy as np

Measure = Callable[[np.ndarray], np.ndarray]


def _top1(probabilities: np.ndarray) -> np.ndarray:
    return probabilities.max(-1)


def _margin(probabilities: np.ndarray) -> np.ndarray:
    if probabilities.shape[-1] == 1:
        return np.ones(probabilities.shape[:-1])
    second, first = np.partition(probabilities, -2, axis=-1)[..., -2:].T
    return (first - second).T


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    classes = max(2, probabilities.shape[-1])
    logarithms = np.log(np.where(probabilities > 0, probabilities, 1.0))
    return 1.0 + (probabilities * logarithms).sum(-1) / np.log(classes)


# By name. All are shares: 1 is certain, and 0 is a tie or as uncertain as can be.
MEASURES: dict[str, Measure] = {"top1": _top1, "margin": _margin, "entropy": _entropy}


def confidence(measure: str, logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return the confidence in each row's most probable class.

    `top1` is the largest probability, `margin` its distance from the second largest, `entropy` one
    minus the entropy over that of a uniform distribution. A row that is not finite gives 0.
    Shapes: logits [n classes] -> float64 [n], from 0 to 1.
    Units:  logits are divided by the temperature before the softmax.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    usable = np.isfinite(scaled).all(-1)
    scaled = np.where(usable[:, None], scaled, 0.0)
    exponentials = np.exp(scaled - scaled.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    return np.where(usable, np.clip(MEASURES[measure](probabilities), 0.0, 1.0), 0.0)


def mask_confidence(measure: str, masks: np.ndarray, _temperature: float = 1.0) -> np.ndarray:
    """Return the mean confidence of a segmentation over its positions.

    Masks are shares already, so no temperature applies. A row that is not finite gives 0.
    Shapes: masks [n k ...], the share of each slot per position -> float64 [n], from 0 to 1.
    """
    shares = np.moveaxis(np.asarray(masks, np.float64), 1, -1)
    shares = shares.reshape(len(shares), -1, shares.shape[-1])
    usable = np.isfinite(shares).all((1, 2))
    shares = np.where(usable[:, None, None], shares, 0.0)
    means = MEASURES[measure](shares).mean(-1)
    return np.where(usable, np.clip(means, 0.0, 1.0), 0.0)


# The outputs from which a policy can decide, by name.
DECIDES = {"logits": confidence, "masks": mask_confidence}
