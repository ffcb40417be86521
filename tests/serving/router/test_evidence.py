# SPDX-License-Identifier: Apache-2.0
"""The test of a certificate on its traffic: exact, rarely wrong by chance, and soon right."""

import itertools
import json
import math
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest
from support.serving.routers import src

RISKS = (0.005, 0.01, 0.03, 0.1)
ALPHA = 0.05


@pytest.fixture
def evidence(pb):
    return src.evidence


def fed(evidence, risk, losses, state=None):
    found = evidence.Evidence(**(state or {"risk": risk, "alpha": ALPHA}))
    for lost in losses:
        found.add(lost=bool(lost))
    return found


def by_definition(evidence, risk, losses):
    """The money as a sum over all bets and all times at which they may begin."""
    n = len(losses)
    left = [
        (1 - evidence.AT_FIRST) * (1 + t / evidence.WAIT) ** -evidence.FADE for t in range(n + 1)
    ]
    total = left[n]
    for odds in evidence.ODDS:
        chance = odds * risk / (1 - risk + odds * risk)
        ratio = [chance / risk if lost else (1 - chance) / (1 - risk) for lost in losses]
        stakes = [left[t] - left[t + 1] + (evidence.AT_FIRST if t == 0 else 0) for t in range(n)]
        total += sum(stakes[t] * math.prod(ratio[t:]) for t in range(n)) / len(evidence.ODDS)
    return total


@pytest.mark.parametrize("risk", RISKS)
def test_it_is_the_mixture_of_likelihood_ratios(evidence, risk):
    for losses in ([], [0], [1], [0, 1, 0], [1, 1, 0, 0, 0, 0, 1]):
        found = fed(evidence, risk, losses)
        expected = by_definition(evidence, risk, losses) if losses else 1.0
        assert found.money == pytest.approx(expected, rel=1e-12)
        assert (found.samples, found.lost) == (len(losses), sum(losses))


@pytest.mark.parametrize("risk", RISKS)
def test_no_bet_gains_while_the_risk_is_kept(evidence, risk):
    """Exactly, over all sequences: the mean money is 1 at the risk, and less below it."""
    for real in (risk, risk / 2):
        mean = 0.0
        for losses in itertools.product((0, 1), repeat=10):
            lost = sum(losses)
            mean += real**lost * (1 - real) ** (10 - lost) * fed(evidence, risk, losses).money
        assert mean == pytest.approx(1.0, abs=1e-12) if real == risk else mean < 1.0


def alarms(evidence, risk, streams):
    """When each of many streams refutes the certificate; their length if it never does."""
    m, n = streams.shape
    odds = np.array(evidence.ODDS)
    bets = np.full((m, len(odds)), evidence.AT_FIRST / len(odds))
    left = (1 - evidence.AT_FIRST) * (1 + np.arange(n + 1) / evidence.WAIT) ** -evidence.FADE
    when = np.full(m, n)
    for t in range(n):
        gains = np.where(streams[:, t, None], odds, 1.0) / (1 + (odds - 1) * risk)
        bets = (bets + (left[t] - left[t + 1]) / len(odds)) * gains
        refuted = (bets.sum(1) + left[t + 1] >= 1 / ALPHA) & (when == n)
        when[refuted] = t
    return when


def test_the_fast_copy_of_this_file_is_the_router_s(evidence):
    streams = np.random.default_rng(3).random((5, 400)) < 0.03
    when = alarms(evidence, 0.01, streams)
    for stream, at in zip(streams, when, strict=True):
        found = [fed(evidence, 0.01, stream[:n]).refutes for n in (at, at + 1)]
        assert found == [False, True] if at < 400 else not found[-1]


@pytest.mark.parametrize("risk", RISKS)
def test_false_alarms_are_rare_over_a_life(evidence, risk):
    streams = np.random.default_rng(0).random((1000, 10_000)) < risk
    share = (alarms(evidence, risk, streams) < 10_000).mean()
    assert share <= ALPHA, share


# Median number of samples until the alarm, with room; measured: see docs/policies.md.
SOON = {(0.01, 2): 900, (0.01, 3): 400, (0.01, 5): 150, (0.1, 3): 40}


@pytest.mark.parametrize("risk, times", SOON)
def test_a_certificate_that_is_broken_is_soon_refuted(evidence, risk, times):
    streams = np.random.default_rng(1).random((200, 3000)) < times * risk
    assert np.median(alarms(evidence, risk, streams)) <= SOON[risk, times]


def test_a_change_after_a_long_calm_is_noticed(evidence):
    """A test that bets all its money at the start would need many times as long."""
    rng = np.random.default_rng(2)
    calm, worse = rng.random((200, 20_000)) < 0.003, rng.random((200, 3000)) < 0.05
    when = alarms(evidence, 0.01, np.concatenate([calm, worse], 1))
    assert (when >= 20_000).all() and np.median(when) - 20_000 <= 450


def test_it_goes_on_in_another_process(evidence):
    losses = np.random.default_rng(4).random(300) < 0.02
    whole = fed(evidence, 0.01, losses)
    half = fed(evidence, 0.01, losses[:150])
    rest = fed(evidence, 0.01, losses[150:], json.loads(json.dumps(asdict(half))))
    assert rest == whole and rest.money == whole.money


def test_a_risk_of_zero_is_refuted_by_a_few(evidence):
    assert fed(evidence, 0.0, [0] * 1000).money < 1.0
    assert fed(evidence, 0.0, [1] * 3).refutes


def test_many_samples_take_no_memory_and_lose_no_money(evidence):
    found = evidence.Evidence(0.1, ALPHA)
    tracemalloc.start()
    for _ in range(100_000):
        found.add(lost=False)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert 0 < found.money < 1 and len(found.recent) == evidence.RECENT
