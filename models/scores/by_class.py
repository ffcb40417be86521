# SPDX-License-Identifier: Apache-2.0
"""Scores per class: how often each is right, and for which other classes it is taken."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.models.scores.results import wilson


@dataclass(frozen=True)
class ClassAnswers:
    """The label and the answer of every scored sample.

    Shapes: labels and answers [n] int64, indices into class_names; samples [n], their names.
    """

    labels: np.ndarray
    answers: np.ndarray
    class_names: tuple[str, ...]
    samples: tuple[str, ...]

    def classes(self) -> list[dict[str, Any]]:
        """Return the score of each class that has samples, the lowest first.

        `taken_for` counts the wrong answers by class, most frequent first. All of them together
        are the confusion matrix.
        """
        found = []
        for label in np.unique(self.labels):
            answers = self.answers[self.labels == label]
            right, n = int((answers == label).sum()), len(answers)
            wrong = Counter(answers[answers != label].tolist()).most_common()
            found.append(
                {
                    "class": self.class_names[label],
                    "n": n,
                    "value": right / n,
                    "interval": wilson(right, n),
                    "taken_for": {self.class_names[other]: count for other, count in wrong},
                }
            )
        return sorted(found, key=lambda one: one["value"])

    def mistakes(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name, the label and the answer of each sample with a wrong answer."""
        for row in np.flatnonzero(self.labels != self.answers):
            label, answer = (self.class_names[part[row]] for part in (self.labels, self.answers))
            yield self.samples[row], label, answer
