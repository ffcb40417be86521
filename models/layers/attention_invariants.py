# SPDX-License-Identifier: Apache-2.0
"""Invariants of attention maps on any runtime, for the parity gate."""

import numpy as np

from saccade.models.interface import Arrays

SUM_TOLERANCE = 1e-4  # of the sum of a map's weights, from 1
SUPPORT_TOLERANCE = 1e-4  # largest weight that only one of two answers may have
_NAMES = ("attention", "box_attention")


def sums_to_one(inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
    """Return how far sums are from 1, or weights below 0, as a share of what is allowed."""
    worst = 0.0
    for weights in _maps(answers):
        off = np.abs(weights.sum(-1) - 1).max(initial=0.0)
        worst = max(worst, float(off), float(-weights.min(initial=0.0)))
    return worst / SUM_TOLERANCE


def same_support(inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
    """Return the largest weight that is 0 in the other answer, as a share of what is allowed."""
    worst = 0.0
    for ours, theirs in zip(_maps(answers), _maps(expected), strict=False):
        only_one = (ours > 0) != (theirs > 0)
        worst = max(worst, float(np.where(only_one, np.maximum(ours, theirs), 0).max(initial=0.0)))
    return worst / SUPPORT_TOLERANCE


def no_excess(inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
    """Return 0 if TVMax certifies its tolerance everywhere, else infinity."""
    return 0.0 if (answers["attention_excess"] == 0).all() else float("inf")


def _maps(outputs: Arrays) -> list[np.ndarray]:
    names = [name for name in _NAMES if name in outputs]
    return [outputs[name].reshape(len(outputs[name]), -1).astype(np.float64) for name in names]
