# SPDX-License-Identifier: Apache-2.0
"""Variants of rising cost and accuracy on a population that is as large as is asked."""

import numpy as np

from saccade.exporter.policy.answers import VariantAnswers

CLASSES = 4
# Name, seconds per sample, and how far the right class is ahead.
VARIANTS = (("small", 1.0, 2.0), ("middle", 4.0, 2.8), ("large", 20.0, 3.2))
FULL = "large"


def population(n: int, seed: int) -> tuple[list[VariantAnswers], np.ndarray]:
    """Logits of each variant and true labels: some samples are easy for all, some for none.

    Shapes: labels [n].
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    ease = rng.normal(1.0, 2.2, n)
    variants = []
    for name, seconds, skill in VARIANTS:
        logits = 0.6 * rng.normal(size=(n, CLASSES))
        logits[np.arange(n), labels] += skill + ease
        variants.append(VariantAnswers(name, name * 8, seconds, logits))
    return variants, labels
