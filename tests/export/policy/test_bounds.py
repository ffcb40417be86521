# SPDX-License-Identifier: Apache-2.0
"""Tests of a risk: exact where they can be counted by hand, valid where they cannot."""

from math import ceil, comb, factorial

import numpy as np
import pytest
from scipy import optimize, stats

from saccade.core.errors import SaccadeError
from saccade.exporter.policy import bounds
from saccade.exporter.policy.bounds import (
    binomial_bound,
    binomial_p_value,
    paired_bound,
    paired_p_value,
    paired_samples_needed,
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


def outcomes(n):
    """All counts of losses of 1 and of -1 among n."""
    return [(lost, won) for lost in range(n + 1) for won in range(n + 1 - lost)]


def score(lost, won, n, risk):
    """Nam's statistic, with the likeliest rate found by search instead of its formula."""

    def against(rate):
        counts = (lost, won, n - lost - won)
        shares = ((rate + risk) / 2, (rate - risk) / 2, 1 - rate)
        return -sum(k * np.log(max(share, 1e-300)) for k, share in zip(counts, shares, strict=True))

    least = abs(risk)
    near = optimize.minimize_scalar(against, bounds=(least, 1), options={"xatol": 1e-12}).x
    rate = min((least, near, 1.0), key=against)
    return ((lost - won) / n - risk) / np.sqrt(max(rate - risk**2, 1e-15) / n)


def brute_force(lost, won, n, risk, level):
    """The p-value as the sum of multinomial probabilities, at 2,000 rates."""
    limit, missed = score(lost, won, n, risk), 0.01 * level
    good = [one for one in outcomes(n) if score(*one, n, risk) <= limit + 1e-6]
    uneven = lost + won
    low = stats.beta.ppf(missed / 2, uneven, n - uneven + 1) if uneven else 0.0
    high = stats.beta.ppf(1 - missed / 2, uneven + 1, n - uneven) if uneven < n else 1.0
    rates = np.linspace(max(low, risk), max(high, risk), 2_000)
    gain = np.clip((rates - risk) / 2, 0, rates)  # a risk below -rate is that of -rate
    chance = 0.0
    for one, other in good:
        ways = factorial(n) // (factorial(one) * factorial(other) * factorial(n - one - other))
        chance += ways * (rates - gain) ** one * gain**other * (1 - rates) ** (n - one - other)
    return min(1.0, float(np.max(chance)) + missed)


@pytest.mark.parametrize("risk", [0.0, 0.1, 0.3, -0.2])
def test_paired_p_value_is_the_sum_over_all_outcomes(risk):
    n = 6
    for lost, won in outcomes(n):
        found = paired_p_value(lost, won, n, risk, 0.1)
        assert found == pytest.approx(brute_force(lost, won, n, risk, 0.1), rel=1e-3), (lost, won)


@pytest.mark.parametrize(
    ("n", "risk", "rate", "level"),
    [
        (60, 0.05, 0.05, 0.1),
        (60, 0.1, 0.3, 0.05),
        (300, 0.0, 0.1, 0.1),
        (300, -0.02, 0.1, 0.05),
        (1_500, 0.01, 0.02, 0.05),
    ],
)
def test_paired_test_rejects_a_true_risk_as_often_as_its_level(n, risk, rate, level):
    """At a mean of `risk`: the chance of all counts that are rejected, without any drawing."""

    def rejects(lost, uneven):
        return paired_p_value(lost, uneven - lost, n, risk, level) <= level

    first, last = (int(stats.binom.ppf(tail, n, rate)) for tail in (1e-3, 1 - 1e-3))
    total, most = 0.0, -1
    for uneven in range(first, last + 1):  # `most` losses of 1 among them are rejected
        while most < uneven and rejects(most + 1, uneven):
            most += 1
        while most >= 0 and not rejects(most, uneven):
            most -= 1
        share = (1 + risk / rate) / 2
        total += stats.binom.pmf(uneven, n, rate) * stats.binom.cdf(most, uneven, share)
    assert total <= level
    if n >= 300:
        assert total > 0.7 * level, "gives away too much"


def test_a_finer_grid_of_rates_changes_nothing(monkeypatch):
    few = [(2, 8, 60, 0.005), (1, 3, 5, 0.5), (0, 1, 5, 0.5)]
    some = [(5, 25, 300, 0.02), (12, 3, 300, 0.1), (0, 7, 300, -0.02)]
    cases = [*few, *some, (41, 45, 1_500, 0.0), (33, 0, 1_500, 0.03), (0, 0, 1_500, 0.01)]
    found = [paired_p_value(*case, 0.05) for case in cases]
    monkeypatch.setattr(bounds, "_PER_ERROR", 10 * bounds._PER_ERROR)
    monkeypatch.setattr(bounds, "_FEWEST", 10 * bounds._FEWEST)
    assert found == pytest.approx([paired_p_value(*case, 0.05) for case in cases], rel=1e-3)


def test_paired_p_value_rises_with_the_losses_and_falls_with_the_gains():
    values = np.array([[paired_p_value(lost, won, 200, 0.05, 0.05) for won in (0, 4, 9)]
                       for lost in (0, 2, 5, 11)])  # fmt: skip
    assert (np.diff(values, axis=0) > 0).all() and (np.diff(values, axis=1) < 0).all()


def test_paired_p_value_of_extremes():
    assert paired_p_value(0, 0, 0, 0.5, 0.05) == 1.0
    assert paired_p_value(60, 0, 60, 0.9, 0.05) == pytest.approx(1.0)
    assert paired_p_value(0, 0, 60, 0.0, 0.05) == pytest.approx(1.0)
    # Nothing lost, nothing gained: nearly the binomial test, whose losses are never made up for.
    assert paired_p_value(0, 0, 60, 0.1, 0.05) == pytest.approx(0.9**60 + 0.0005, rel=1e-3)
    assert paired_p_value(0, 60, 60, 0.0, 0.05) < 0.001
    for level in (0.1, 0.001):
        assert paired_p_value(0, 40, 300, 0.1, level) <= 0.02 * level
    assert 0.001 < paired_p_value(52_000, 48_000, 10**6, 0.005, 0.05) < 0.005


@pytest.mark.parametrize(("lost", "won", "n"), [(5, 5, 300), (2, 30, 300), (6, 0, 60), (0, 40, 60)])
def test_paired_bound_is_where_rejection_begins(lost, won, n):
    bound = paired_bound(lost, won, n, 0.95)
    assert (lost - won) / n < bound < 1
    assert paired_p_value(lost, won, n, bound, 0.05) <= 0.05
    assert paired_p_value(lost, won, n, bound - 2e-5, 0.05) > 0.05


def test_paired_bound_is_above_all_that_is_not_rejected():
    """Of these counts, -0.0245 is rejected, and -0.02398 is not."""
    bound = paired_bound(2, 18, 360, 0.95)
    rejected = [paired_p_value(2, 18, 360, risk, 0.05) <= 0.05 for risk in (-0.0245, -0.02398)]
    assert rejected == [True, False] and bound > -0.02398


def test_paired_bound_of_extremes():
    assert paired_bound(0, 0, 0, 0.95) == paired_bound(60, 0, 60, 0.95) == 1.0
    assert -1 < paired_bound(0, 60, 60, 0.95) < -0.85


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (0, 0.1), (0.05, 0)])
def test_paired_samples_needed_are_the_fewest_that_pass(lost, won):
    def passes(n):
        counts = int(np.ceil(lost * n - 1e-6)), int(np.floor(won * n + 1e-6))
        return paired_p_value(*counts, n, 0.1, 0.05) <= 0.05

    needed = paired_samples_needed(lost, won, 0.1, 0.95)
    assert needed is not None and passes(needed) and not passes(needed - 1)
    if lost == 0:  # else another rate is rounded in favor of some smaller number
        assert needed == next(n for n in range(1, 200) if passes(n))


def test_no_number_of_samples_makes_up_for_a_larger_loss():
    assert paired_samples_needed(0.03, 0.01, 0.02, 0.95) is None
    assert paired_samples_needed(0.02, 0.01, 0.010001, 0.95) is None  # more than there are


def test_samples_needed_are_the_fewest_that_pass():
    assert samples_needed(0.0, 0.05, 0.95) == 59
    needed = samples_needed(0.004, 0.01, 0.95)
    assert needed is not None
    assert binomial_p_value(ceil(0.004 * needed), needed, 0.01) <= 0.05
    assert binomial_p_value(ceil(0.004 * (needed - 1)), needed - 1, 0.01) > 0.05
    # Not 149 samples, of which not one is lost at this rate if that is rounded down.
    assert samples_needed(0.003, 0.02, 0.95) == 236
    assert binomial_p_value(1, 235, 0.02) > 0.05 >= binomial_p_value(1, 236, 0.02)
    assert samples_needed(0.02, 0.01, 0.95) is None


def test_samples_needed_refuses_what_is_no_share():
    with pytest.raises(SaccadeError, match=r"risk 1.5, .*expected shares"):
        samples_needed(0.0, 1.5, 0.95)
