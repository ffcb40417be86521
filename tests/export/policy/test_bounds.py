# SPDX-License-Identifier: Apache-2.0
"""Tests of a risk: exact where they can be counted by hand, valid where they cannot."""

from math import comb, log, sqrt

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[bench]'")

from saccade.errors import SaccadeError
from saccade.exporter.policy.bounds import (
    betting_bound,
    betting_p_value,
    binomial_bound,
    binomial_p_value,
    samples_needed,
)


@pytest.mark.parametrize(("events", "n", "risk"), [(0, 59, 0.05), (2, 10, 0.3), (7, 7, 0.5)])
def test_binomial_p_value_is_the_sum_of_its_terms(events, n, risk):
    terms = [comb(n, k) * risk**k * (1 - risk) ** (n - k) for k in range(events + 1)]
    assert binomial_p_value(events, n, risk) == pytest.approx(sum(terms), rel=1e-12)


@pytest.mark.parametrize("events", [0, 1, 5, 40])
def test_binomial_bound_is_the_largest_risk_that_is_not_rejected(events):
    bound = binomial_bound(events, 100, 0.95)
    assert binomial_p_value(events, 100, bound) == pytest.approx(0.05, rel=1e-9)


def test_bound_of_nothing_but_events_is_one():
    assert binomial_bound(4, 4, 0.95) == 1.0
    assert binomial_bound(0, 0, 0.95) == 1.0


@pytest.mark.parametrize(("rate", "ahead"), [(0.0, 0.0), (0.1, 0.05)])
def test_betting_rejects_a_true_risk_no_more_often_than_its_level(rate, ahead):
    """Losses of mean `ahead`, so that "above ahead" is just true."""
    rng = np.random.default_rng(0)
    shares = (rate / 2 + ahead, rate / 2)
    rejected = 0
    for _ in range(400):
        drawn = rng.random(300)
        losses = np.where(drawn < shares[0], 1.0, np.where(drawn < sum(shares), -1.0, 0.0))
        rejected += betting_p_value(losses, ahead, 0.1) <= 0.1
    # 400 draws at a chance of 0.1: 65 are exceeded once in 100,000 times.
    assert rejected <= 65


def test_betting_rejects_what_is_far_off():
    losses = np.where(np.random.default_rng(0).random(1_000) < 0.01, 1.0, 0.0)
    assert betting_p_value(losses, 0.1, 0.05) < 1e-6
    assert losses.mean() < betting_bound(losses, 0.95) < 0.05


def one_bet_at_a_time(losses, risk, level):
    """The same game as a gambler plays it, who has seen the samples before and no other."""
    mean, capital, most = (risk + 1) / 2, 1.0, 1.0
    total, squares, variance = 0.5, 0.25, 0.25
    for seen, loss in enumerate(losses, 1):
        x = (loss + 1) / 2
        stake = min(sqrt(2 * log(1 / level) / (len(losses) * variance)), 0.75 / (1 - mean))
        capital *= 1 + stake * (mean - x)
        most = max(most, capital)
        total += x
        squares += (x - total / (seen + 1)) ** 2
        variance = squares / (seen + 1)
    return 1 / most


@pytest.mark.parametrize("seed", range(4))
def test_betting_stakes_know_nothing_of_the_samples_to_come(seed):
    losses = np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], 200, p=[0.1, 0.8, 0.1])
    expected = one_bet_at_a_time(losses, 0.1, 0.05)
    assert betting_p_value(losses, 0.1, 0.05) == pytest.approx(expected, rel=1e-9)
    assert betting_p_value(losses[:0], 0.5, 0.05) == 1.0


def test_samples_needed_are_the_fewest_that_pass():
    assert samples_needed(0.0, 0.05, 0.95) == 59
    needed = samples_needed(0.004, 0.01, 0.95)
    assert needed is not None
    assert binomial_p_value(round(0.004 * needed), needed, 0.01) <= 0.05
    assert samples_needed(0.02, 0.01, 0.95) is None


def test_samples_needed_refuses_what_is_no_share():
    with pytest.raises(SaccadeError, match=r"risk 1.5, .*expected shares"):
        samples_needed(0.0, 1.5, 0.95)
