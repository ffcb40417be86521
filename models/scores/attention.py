# SPDX-License-Identifier: Apache-2.0
"""Selectivity of attention, its movement from step to step, and repetition of words."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError

_PAIR_WEIGHT, _DOUBLED_WEIGHT = 1, 2
_AFFORDABLE_CELLS = 2**24  # numbers in memory while steps are compared


def zero_share(attention: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Return the share of valid positions with a weight of exactly 0.

    A sample without valid positions gives NaN.
    Shapes: attention [n ...], valid the same bool -> [n] float64.
    Raises: ShapeError if the shapes differ.
    Source: Martins et al. 2021 (Sparse and Structured Visual Attention), section 3, "Sparsity".
    """
    count = np.ones(attention.shape, bool) if valid is None else np.asarray(valid, bool)
    if count.shape != attention.shape:
        raise ShapeError(
            f"valid: found shape {count.shape}, expected that of the attention, "
            f"{attention.shape}. Pass one truth value per position."
        )
    rest = tuple(range(1, attention.ndim))
    zeros = ((attention == 0) & count).sum(rest).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return zeros / count.sum(rest)


def jensen_shannon(attention: np.ndarray, valid: np.ndarray | None = None) -> float:
    """Return the mean Jensen-Shannon divergence between all pairs of different steps.

    It is 0 if there is only one step. The paper gives no formula. Here all pairs count, because a
    phrase may return after any number of steps; with natural logarithms it is at most ln 2.
    Shapes: attention [steps ...], each step's weights >= 0 with sum 1; valid [steps] bool.
    Units:  nats.
    Raises: SaccadeError if a step's weights are not a distribution.
    Source: Martins et al. 2021, section 3.1, "Repetition".
    """
    steps = attention.reshape(len(attention), -1).astype(np.float64)
    if valid is not None:
        steps = steps[np.asarray(valid, bool)]
    if steps.size and (steps.min() < 0 or np.abs(steps.sum(1) - 1).max() > 1e-3):
        raise SaccadeError(
            f"attention: found weights from {steps.min():g} with sums up to "
            f"{steps.sum(1).max():g}, expected none below 0 and a sum of 1 per step. "
            "Pass weights, not scores."
        )
    if len(steps) < 2:
        return 0.0
    entropy = _entropy(steps)
    rows = max(1, _AFFORDABLE_CELLS // steps.size)
    total = 0.0
    for start in range(0, len(steps), rows):
        part = slice(start, start + rows)
        middle = (steps[part, None] + steps[None]) / 2
        total += float((_entropy(middle) - (entropy[part, None] + entropy[None]) / 2).sum())
    return max(0.0, total / (len(steps) * (len(steps) - 1)))


def _entropy(p: np.ndarray) -> np.ndarray:
    """Shapes: [... n] -> [...]."""
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)


def repetition(words: Sequence[str], references: Sequence[Sequence[str]] = ()) -> float:
    """Return the repetition in a text beyond that of its references, in percent of words.

    A pair of adjacent words that occurs at least twice counts as often as it occurs more than in
    any reference. A word directly after itself counts twice as much. The sum is divided by the
    mean length of the references. Without references, the first of equal pairs is free, and the
    sum is divided by the length of the text.
    Source: Malaviya et al. 2018 (Sparse and Constrained Attention for Neural Machine
            Translation), the REP score with its weights 1 and 2, for pairs; called REP in
            Martins et al. 2021, table 1.
    """
    repeated = _pairs(words)
    allowed: Counter[tuple[str, str]] = Counter()
    for reference in references:
        allowed |= _pairs(reference)
    total = 0
    for pair, count in repeated.items():
        free = allowed[pair] if references else 1
        if count >= 2:
            total += _PAIR_WEIGHT * max(0, count - free)
        if pair[0] == pair[1]:
            total += _DOUBLED_WEIGHT * max(0, count - allowed[pair])
    length = np.mean([len(reference) for reference in references]) if references else len(words)
    return float(100 * total / length) if length else 0.0


def _pairs(words: Sequence[str]) -> Counter[tuple[str, str]]:
    return Counter(pairwise(words))
