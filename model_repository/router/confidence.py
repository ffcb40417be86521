# SPDX-License-Identifier: Apache-2.0
"""How sure a variant is of its answer: the figure by which a chain of variants decides to stop.

The router runs this file, and `saccade calibrate` imports it, so that both compare the same
numbers with a threshold. NumPy only.
"""

from collections.abc import Callable, Sequence

import numpy as np

# Takes the softmax before its division, whose largest is 1, and its sum; may change the former.
Measure = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _top1(exponentials: np.ndarray, total: np.ndarray) -> np.ndarray:
    return 1.0 / total


def _margin(exponentials: np.ndarray, total: np.ndarray) -> np.ndarray:
    # Removing the largest costs less than partial sorting, which also lets other threads go first.
    exponentials[np.arange(len(exponentials)), exponentials.argmax(-1)] = 0.0
    return 1.0 / total - exponentials.max(-1) / total


def _entropy(exponentials: np.ndarray, total: np.ndarray) -> np.ndarray:
    probabilities = exponentials / total[:, None]
    classes = max(2, probabilities.shape[-1])
    logarithms = np.log(np.where(probabilities > 0, probabilities, 1.0))
    share = 1.0 + (probabilities * logarithms).sum(-1) / np.log(classes)
    return np.clip(share, 0.0, 1.0)  # the last digit of a sum may lead beyond


# By name. All are shares: 1 is certain, and 0 is a tie or as uncertain as can be.
MEASURES: dict[str, Measure] = {"top1": _top1, "margin": _margin, "entropy": _entropy}


def confidence(measure: str, logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return the confidence in each row's most probable class.

    `top1` is the largest probability, `margin` its distance from the second largest, `entropy` one
    minus the entropy over that of a uniform distribution. A row that is not finite gives 0.
    Shapes: logits [n classes] -> float64 [n], from 0 to 1.
    Units:  logits are divided by the temperature before the softmax.
    """
    # The router calls this for a few rows at a time: the number of NumPy's calls is what it costs.
    scaled = np.divide(logits, temperature, dtype=np.float64)
    finite = np.isfinite(scaled)
    if not finite.all():
        usable = finite.all(-1)
        sure = confidence(measure, np.where(usable[:, None], scaled, 0.0), 1.0)
        return np.where(usable, sure, 0.0)
    scaled -= scaled.max(-1, keepdims=True)
    exponentials = np.exp(scaled, out=scaled)
    return MEASURES[measure](exponentials, exponentials.sum(-1))


def mask_confidence(measure: str, masks: np.ndarray, _temperature: float = 1.0) -> np.ndarray:
    """Return the mean confidence of a segmentation over its positions.

    Masks are shares already, so no temperature applies. A row that is not finite gives 0.
    Shapes: masks [n k ...], the share of each slot per position -> float64 [n], from 0 to 1.
    """
    shares = np.moveaxis(np.asarray(masks, np.float64), 1, -1)
    shares = shares.reshape(len(shares), -1, shares.shape[-1])
    usable = np.isfinite(shares).all((1, 2))
    flat = np.where(usable[:, None, None], shares, 1.0).reshape(-1, shares.shape[-1])
    largest = flat.max(-1)
    each = MEASURES[measure](flat / largest[:, None], flat.sum(-1) / largest)
    means = each.reshape(len(shares), -1).mean(-1)
    return np.where(usable, np.clip(means, 0.0, 1.0), 0.0)


def stops(
    sure: np.ndarray, threshold: float, answers: np.ndarray, early: Sequence[int] | None
) -> np.ndarray:
    """Return which rows end at a step: those that are sure of one of the classes `early`.

    None stands for all classes, or for answers without classes.
    Shapes: sure [n], answers [n], classes, or [n classes], logits -> bool [n].
    """
    enough = sure >= threshold
    if early is None:
        return enough
    return enough & np.isin(answers if answers.ndim == 1 else answers.argmax(-1), early)


# The outputs from which a policy can decide, by name.
DECIDES: dict[str, Callable[[str, np.ndarray, float], np.ndarray]] = {
    "logits": confidence,
    "masks": mask_confidence,
    "similarities": confidence,  # of embeddings to anchors
}
