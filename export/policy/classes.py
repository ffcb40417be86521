# SPDX-License-Identifier: Apache-2.0
"""The risk of each class: which classes have enough samples, and chains that keep all of them.

The class of a sample is the full model's answer, or its label. A chain cannot know either when a
cheap step answers, only which class that step answers. So a chain also has the classes with which
it may stop early, and each class is tested on the samples that really are of it.

The claim is that no class is above the risk. It passes if every class passes its own test, each at
the confidence of the whole claim: if one class is above the risk, all pass at most as often as that
one does. So the number of classes costs no confidence.
Source: Berger 1982, Technometrics 24(4), intersection-union tests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.exporter.policy.answers import Answers
from saccade.exporter.policy.bounds import MOST_SAMPLES
from saccade.exporter.policy.certify import (
    Certificate,
    Chain,
    Counts,
    MissingCertificate,
    RiskTest,
    chosen,
    front,
    is_undominated,
    tested,
)
from saccade.exporter.policy.options import Against

OTHERS = "the other classes"
_LOST = 0.25  # of the risk: a class with enough samples passes its test if this part is lost
_PRIOR = 10.0  # samples for which the mean of all classes counts in the estimate of one class


@dataclass(frozen=True)
class ClassTest(RiskTest):
    """The test of all samples, of each class, and of all other classes together.

    Shapes: of [n], the group of each sample besides the first; sizes [g], the testing samples of
            each group. The other classes form no group if they have too few samples even together.
    """

    names: tuple[str, ...]  # of the groups
    classes: tuple[int, ...]
    learn: int
    of: np.ndarray
    sizes: np.ndarray

    def groups(self, losses: np.ndarray) -> list[Counts]:
        """Return what is lost and won in each group of the testing samples."""
        part = slice(self.learn, None)
        lost, won = self.sums(part, losses > 0), self.sums(part, losses < 0)
        columns = (counts.astype(int).tolist() for counts in (lost, won, self.sizes))
        return [Counts(*row) for row in zip(self.names, *columns, strict=False)]

    def sums(self, part: slice, values: np.ndarray) -> np.ndarray:
        """Return the sum of the values of some samples in each group.

        Shapes: values [n of the part] -> [g].
        """
        groups = len(self.sizes)
        found = np.bincount(self.of[part], values, groups + 1)[:groups]
        found[0] = values.sum()
        return found


def class_samples(risk: float, confidence: float, against: Against) -> int | None:
    """Return how many testing samples of a class are enough to certify it on its own."""
    return RiskTest(confidence, against).samples_needed(_LOST * risk, 0.0, risk)


def certify_classes(
    answers: Answers,
    risks: Sequence[float],
    *,
    names: Sequence[str],
    confidence: float,
    against: Against,
    steps: int,
) -> list[Certificate | MissingCertificate]:
    """Find for each risk the cheapest chain that passes, also in each class.

    All chains end in the full model, which answers what no step may stop at: `names` are those of
    all classes, and a class with too few samples is none with which a step may stop.

    Raises: SaccadeError if no class has enough samples, or labels are needed and missing.
    """
    table = answers.differs if against == "full" else answers.lost
    plain, found = RiskTest(confidence, against), []
    for risk in risks:
        test = _test(answers, names, risk, plain)
        chains = _chains(answers, table, test, risk, steps) if risk else []
        found.append(chosen(answers, tested(chains, answers, table), risk, test))
    return found


def _test(answers: Answers, names: Sequence[str], risk: float, test: RiskTest) -> ClassTest:
    """Return the test of a risk. Its classes follow from their numbers of samples alone.

    Raises: SaccadeError if no class has enough.
    """
    full, labels = answers.classes[answers.full], answers.labels
    known = full if test.against == "full" or labels is None else labels
    testing = known[answers.learn :]
    counts = np.bincount(testing[testing >= 0], minlength=len(names))
    needed = class_samples(risk, test.confidence, test.against) or MOST_SAMPLES if risk else 1
    classes = np.flatnonzero(counts >= needed)
    if not len(classes):
        most = int(counts.argmax())
        raise SaccadeError(
            f"--per-class: of {len(testing):,} samples that certify, the most frequent class, "
            f"{names[most]}, has {counts[most]:,}, expected at least {needed:,} of a class to "
            f"certify a risk of {risk:g}. Pass more data or a larger --risk, or drop --per-class."
        )
    places = np.full(len(names) + 1, len(classes) + 1)  # the last one is that of class -1
    places[classes] = np.arange(len(classes)) + 1
    sizes = np.bincount(places[testing], minlength=len(classes) + 2)
    sizes[0] = len(testing)
    sizes = sizes if sizes[-1] >= needed else sizes[:-1]
    groups, own = ("", *(names[one] for one in classes), OTHERS), tuple(classes.tolist())
    return ClassTest(
        **vars(test), names=groups, classes=own, learn=answers.learn, of=places[known], sizes=sizes
    )


def _chains(
    answers: Answers, table: np.ndarray, test: ClassTest, risk: float, most_steps: int
) -> list[Chain]:
    """Return chains in the order of the chance that a group fails, which the learning samples
    estimate, so that the sequence of tests does not end too early.
    """
    binom = require("scipy.stats", extra="bench").binom
    learning, table, part = answers.learning, table[:, : answers.learn], slice(answers.learn)
    level, n = 1 - test.confidence, test.sums(part, np.ones(answers.learn))
    allowed = binom.ppf(level, test.sizes, risk)  # losses with which a group passes
    allowed -= binom.cdf(allowed, test.sizes, risk) > level
    # A loss weighs as much as its part of what its groups may lose.
    weights = np.append(test.sizes / np.maximum(allowed, 1) / np.maximum(n, 1), 0.0)
    weighted = table * (weights[0] + weights[test.of[part]])
    chains: dict[Chain, float] = {}
    for early in _early_classes(learning, weighted, test.classes):
        stops = np.isin(learning.classes, early)
        masked = replace(learning, confidence=np.where(stops, learning.confidence, -1.0))
        for chain in front(masked, weighted, most_steps, to_full=True):
            chain = replace(chain, early=early)
            lost = np.maximum(test.sums(part, chain.losses(learning, table)), 0)
            rates = (lost + _PRIOR * lost[0] / n[0]) / (n + _PRIOR)
            chains[chain] = float(binom.sf(allowed, test.sizes, rates).sum())
    made, doubt = list(chains), np.array(list(chains.values()))
    seconds = np.array([chain.seconds(learning) for chain in made])
    kept = np.flatnonzero(is_undominated(seconds, doubt))
    order = [made[at] for at in sorted(kept, key=lambda at: (doubt[at], -seconds[at]))]
    # A ladder down to the first one: it loses less, as its thresholds are higher.
    ladder = [at for at, chain in enumerate(made) if chain.above(order[0])]
    return [*(made[at] for at in sorted(ladder, key=lambda at: -seconds[at])), *order]


def _early_classes(
    learning: Answers, table: np.ndarray, classes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield classes with which steps may stop: all, then without those that take the most samples
    of others while they are sure.
    """
    width = int(max(learning.classes.max(), *classes)) + 1
    taken, given = np.zeros(width), np.ones(width)
    for at in range(learning.full):
        own, sure = learning.classes[at], learning.confidence[0, at]
        taken += np.bincount(own, np.maximum(table[at], 0) * (sure >= np.median(sure)), width)
        given += np.bincount(own, minlength=width)
    order = sorted(classes, key=lambda one: -taken[one] / given[one])
    left_out = 0
    while left_out < len(order):
        yield tuple(sorted(order[left_out:]))
        left_out = max(1, 2 * left_out)
