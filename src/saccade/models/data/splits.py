# SPDX-License-Identifier: Apache-2.0
"""Stratified splits of samples, the same on every machine."""

import numpy as np


def stratified_split(
    labels: np.ndarray, *, validation: int, test: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return indices by split, each class in proportion; `validation` and `test` are exact counts.

    Samples are shuffled, sorted by class, and taken at even distances.
    Shapes: labels [n] -> three int64 vectors that partition range(n), each ascending.
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    test_part, rest = _take_evenly(by_class, test)
    validation_part, train_part = _take_evenly(rest, validation)
    return {
        "train": np.sort(train_part),
        "validation": np.sort(validation_part),
        "test": np.sort(test_part),
    }


def _take_evenly(items: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    places = ((2 * np.arange(count) + 1) * len(items)) // (2 * max(count, 1))
    taken = np.zeros(len(items), dtype=bool)
    taken[places] = True
    return items[taken], items[~taken]
