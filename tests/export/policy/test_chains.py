# SPDX-License-Identifier: Apache-2.0
"""Chains: what the histograms count is what a loop over samples counts."""

from dataclasses import replace

import numpy as np
import pytest
from populations import FULL, population

from saccade.exporter.policy import certify
from saccade.exporter.policy.answers import MEASURES, Answers, answers_of
from saccade.exporter.policy.certify import Chain, front


@pytest.fixture(scope="module")
def answers() -> Answers:
    variants, labels = population(400, seed=3)
    return answers_of(variants, labels, full=FULL, seed=0)


def one_by_one(chain: Chain, answers: Answers, table: np.ndarray) -> tuple[float, float]:
    """Mean loss and mean seconds as a server would meet them, a sample at a time."""
    confidence = answers.confidence[MEASURES.index(chain.measure)]
    loss = seconds = 0.0
    for sample in range(answers.n):
        for step, threshold in zip(chain.steps, (*chain.thresholds, 0.0), strict=True):
            seconds += answers.variants[step].seconds
            if confidence[step, sample] >= threshold:
                loss += table[step, sample]
                break
    return loss / answers.n, seconds / answers.n


@pytest.mark.parametrize("steps", [(2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("measure", MEASURES)
def test_grid_counts_what_a_loop_counts(answers, steps, measure):
    grid = certify._Grid(answers, answers.lost, steps, measure)
    loss, seconds = grid._sums()
    rng = np.random.default_rng(1)
    for _ in range(8):
        place = tuple(int(rng.integers(size)) for size in loss.shape)
        thresholds = tuple(float(x[at]) for x, at in zip(grid.levels, place, strict=True))
        chain = Chain(steps, measure, thresholds)
        expected = one_by_one(chain, answers, answers.lost)
        assert (loss[place], seconds[place]) == pytest.approx(expected, abs=1e-12)
        assert chain.losses(answers, answers.lost).mean() == pytest.approx(expected[0], abs=1e-12)
        assert chain.seconds(answers) == pytest.approx(expected[1])
        assert sum(chain.shares(answers)) == pytest.approx(1.0)


def test_front_has_nothing_that_another_one_beats(answers):
    found = front(answers, answers.differs, 3)
    met = [one_by_one(chain, answers, answers.differs) for chain in found]
    last = found.index(min(found, key=lambda chain: chain.seconds(answers)))
    assert last == len(found) - 1, "the cheapest comes last"
    assert met[0][0] == 0.0, "the first loses nothing"
    for loss, seconds in met[-10:]:
        assert not any(other < loss and spent < seconds - 1e-9 for other, spent in met)


def test_front_asks_no_variant_that_costs_more_than_the_full_model(answers):
    dear = replace(answers, full=1)
    assert set(certify._orders(dear, 3)) == {(0,), (1,), (0, 1)}
    assert all(len(chain.steps) <= 2 for chain in front(answers, answers.differs, 2))
