# SPDX-License-Identifier: Apache-2.0
"""Risks of single classes: that they are kept, and what a chain does where it cannot know them."""

from dataclasses import replace

import numpy as np
import pytest
from populations import FULL, population
from scipy import stats

from saccade.core.errors import SaccadeError
from saccade.exporter.policy.answers import Answers, VariantAnswers, answers_of
from saccade.exporter.policy.certify import Certificate, Chain, MissingCertificate, certify, front
from saccade.exporter.policy.classes import OTHERS, certify_classes, class_samples
from saccade.model_repository.router.confidence import confidence

TRIALS, CONFIDENCE, RISK, SAMPLES = 20, 0.9, 0.05, 2_400
# At a chance of 1 - CONFIDENCE, more than this comes once in 10,000 times.
MOST_EXCEEDED = int(stats.binom.ppf(1 - 1e-4, TRIALS, 1 - CONFIDENCE))
NAMES = ("cat", "dog", "fox", "lynx")
RARE, LIKE, RAREST = 2, 0, 3  # the classes fox, cat and lynx


@pytest.fixture(scope="module")
def everybody() -> tuple[list[VariantAnswers], np.ndarray]:
    """A population in which the smallest variant is sure that every third fox is a cat."""
    variants, labels = population(40_000, seed=1)
    rng = np.random.default_rng(2)
    kept = rng.random(len(labels)) < np.array([1.0, 1.0, 0.22, 0.02])[labels]
    fooled = (labels == RARE) & (rng.random(len(labels)) < 1 / 3)
    small = variants[0].logits.copy()
    small[fooled, LIKE] = small[fooled].max(-1) + 8
    variants = [replace(variants[0], logits=small), *variants[1:]]
    return [replace(one, logits=one.logits[kept]) for one in variants], labels[kept]


def drawn(everybody: tuple[list[VariantAnswers], np.ndarray], seed: int) -> Answers:
    variants, labels = everybody
    rows = np.random.default_rng(seed).choice(len(labels), SAMPLES)
    some = [replace(variant, logits=variant.logits[rows]) for variant in variants]
    return answers_of(some, labels[rows], full=FULL, seed=seed)


def certified(answers: Answers, against: str, risk: float = RISK) -> Certificate:
    (found,) = certify_classes(
        answers, (risk,), names=NAMES, confidence=CONFIDENCE, against=against, steps=3
    )
    assert isinstance(found, Certificate)
    return found


def true_losses(
    everybody: tuple, chain: Chain, answers: Answers, against: str
) -> tuple[np.ndarray, np.ndarray]:
    """What each sample of the population loses, and its class."""
    variants, labels = everybody
    classes = np.stack([one.logits.argmax(-1) for one in variants])
    wrong = (classes != labels).astype(float)
    table = (classes != classes[-1]) * 1.0 if against == "full" else wrong - wrong[-1]
    left, lost = np.ones(len(labels), bool), np.zeros(len(labels))
    for step, threshold in zip(chain.steps, (*chain.thresholds, -1.0), strict=True):
        sure = confidence(chain.measure, variants[step].logits, answers.variants[step].temperature)
        stops = left & (sure >= threshold)
        if chain.early is not None and threshold >= 0:
            stops &= np.isin(classes[step], chain.early)
        lost[stops] = table[step, stops]
        left &= ~stops
    return lost, classes[-1] if against == "full" else labels


@pytest.mark.parametrize("against", ["full", "labels"])
def test_no_certified_class_is_above_the_risk(everybody, against):
    """Together: a calibration counts as exceeded if any one of its classes is."""
    exceeded = cheaper = 0
    for seed in range(TRIALS):
        answers = drawn(everybody, seed)
        (found,) = certify_classes(
            answers, (RISK,), names=NAMES, confidence=CONFIDENCE, against=against, steps=3
        )
        if isinstance(found, MissingCertificate):
            continue
        lost, known = true_losses(everybody, found.chain, answers, against)
        own = [NAMES.index(one.name) for one in found.classes if one.name != OTHERS]
        exceeded += max(lost.mean(), *(lost[known == one].mean() for one in own)) > RISK
        cheaper += found.seconds < 0.8 * answers.variants[answers.full].seconds
    assert cheaper > TRIALS / 2, "a test that saves nothing promises nothing"
    assert exceeded <= MOST_EXCEEDED


def test_the_mean_hides_a_rare_class(everybody):
    """The control: what all samples together are certified for, foxes are not."""
    exceeded = 0
    for seed in range(TRIALS // 4):
        answers = drawn(everybody, seed)
        (found,) = certify(answers, (RISK,), confidence=CONFIDENCE, against="full", steps=3)
        lost, known = true_losses(everybody, found.chain, answers, "full")
        exceeded += lost.mean() <= RISK < lost[known == RARE].mean()
    assert exceeded > TRIALS / 8


def test_a_class_with_few_samples_is_answered_by_the_full_model(everybody):
    answers = drawn(everybody, 0)
    found = certified(answers, "full")
    assert found.chain.steps[-1] == answers.full
    assert [one.name for one in found.classes] == ["cat", "dog", "fox"], "too few even together"
    assert RAREST not in found.chain.early and len(found.chain.early) > 0
    ends = found.chain.ends(answers)
    given = answers.classes[np.array(found.chain.steps)[ends], np.arange(answers.n)]
    early = ends < len(found.chain.steps) - 1
    assert set(given[early]) <= set(found.chain.early) and early.any()
    lynx = given == RAREST
    assert lynx.any() and (answers.classes[answers.full][lynx] == RAREST).all()


def test_every_chain_of_classes_ends_in_the_full_model(everybody):
    """Also where a cheaper last step would lose nothing."""
    answers = drawn(everybody, 0)
    table = np.zeros_like(answers.differs[:, : answers.learn])
    chains = front(answers.learning, table, 3, to_full=True)
    assert {chain.steps[-1] for chain in chains} == {answers.full}


def test_classes_follow_from_their_numbers_alone(everybody):
    """Not from what was lost: a class that was lost would otherwise not have to pass."""
    answers = drawn(everybody, 0)
    testing = np.bincount(answers.testing.classes[answers.full])
    needed = class_samples(RISK, CONFIDENCE, "full")
    enough = [name for name, count in zip(NAMES, testing, strict=True) if count >= needed]
    found = certified(answers, "full")
    assert enough == [one.name for one in found.classes]
    assert [one.samples for one in found.classes] == [n for n in testing if n >= needed]
    lossy = replace(answers, classes=np.array([answers.classes[0] * 0, *answers.classes[1:]]))
    assert [one.name for one in certified(lossy, "full").classes] == enough


def test_each_class_is_tested_and_the_others_together(everybody):
    """At a large risk even the rarest classes together have enough samples."""
    answers = drawn(everybody, 0)
    testing = answers.testing
    lynxes = int((testing.classes[answers.full] == RAREST).sum())
    found = certified(answers, "full")
    losses = found.chain.losses(testing, answers.differs[:, answers.learn :])
    for one in found.classes:
        own = testing.classes[answers.full] == NAMES.index(one.name)
        assert one.observed == pytest.approx(losses[own].mean(), abs=1e-6)
        assert one.observed <= one.bound <= RISK and one.samples == own.sum()
    assert 0 < lynxes < class_samples(RISK, CONFIDENCE, "full")
    names = ("cat", "dog", *[f"fox {at}" for at in range(8)])
    many = answers.classes.copy()
    foxes = many == RARE
    many[foxes] = 2 + np.broadcast_to(np.arange(answers.n), many.shape)[foxes] % 8
    many[many == RAREST] = 2
    (found,) = certify_classes(
        replace(answers, classes=many), (RISK,), names=names, confidence=CONFIDENCE,
        against="full", steps=3,
    )  # fmt: skip
    assert [one.name for one in found.classes] == ["cat", "dog", OTHERS]
    assert found.classes[-1].samples == (many[answers.full, answers.learn :] >= 2).sum()
    assert set(found.chain.early) <= {0, 1}


def test_what_is_missing_is_named(everybody):
    answers = drawn(everybody, 0)
    with pytest.raises(
        SaccadeError, match=r"most frequent class, (cat|dog), has .* at least 2,006 "
    ):
        certify_classes(
            answers, (0.005,), names=NAMES, confidence=0.99, against="full", steps=3
        )  # fmt: skip
    always = np.where(answers.classes == LIKE, 1, LIKE)
    always[answers.full] = answers.classes[answers.full]  # no cheaper variant is ever right
    wrong = replace(answers, classes=always, confidence=np.ones_like(answers.confidence))
    (found,) = certify_classes(
        wrong, (RISK,), names=NAMES, confidence=CONFIDENCE, against="full", steps=2
    )
    assert isinstance(found, MissingCertificate) and found.worst in NAMES and found.bound > RISK


def test_a_risk_of_none_is_the_full_model(everybody):
    answers = drawn(everybody, 0)
    found = certified(answers, "labels", 0.0)
    assert found.chain.steps == (answers.full,) and found.chain.early is None
