# SPDX-License-Identifier: Apache-2.0
"""A level of the load-adaptive choice by itself: when it rises, and what it counts then."""

import pytest
from test_adaptive import clock  # noqa: F401


def test_a_level_rises_when_a_better_candidate_has_fit_for_some_time(clock):  # noqa: F811
    from adaptive import HOLD_S, MOST_HOLD_S, Level

    def seconds_until_it_rises(level):
        began_s = clock.now
        while level.at:
            clock.now += 0.05
            level.rise([True] * level.at, clock.now)
        return clock.now - began_s

    level = Level((None,) * 3)
    level.fall(2, clock.now)
    for fit in (True, False) * 20:
        clock.now += HOLD_S / 2
        level.rise([fit, False], clock.now)
    assert level.at == 2, "it never fit for long"
    waits = []
    for _ in range(4):
        waits.append(seconds_until_it_rises(level))
        clock.now += 1
        level.fall(2, clock.now)
    assert waits == pytest.approx([HOLD_S, 2 * HOLD_S, MOST_HOLD_S, MOST_HOLD_S], abs=0.15)
    seconds_until_it_rises(level)
    clock.now += 60
    level.fall(2, clock.now)
    assert seconds_until_it_rises(level) == pytest.approx(HOLD_S, abs=0.15)


def test_a_level_that_rises_starts_to_count_anew(clock):  # noqa: F811
    from adaptive import MOST_HOLD_S, Level

    level = Level((None,) * 2)
    level.fall(1, clock.now)
    level.wants(1000)
    level.rise([True], clock.now)
    level.rise([True], clock.now + MOST_HOLD_S)
    assert level.at == 0 and level.demand.per_second > 0 and level.lasting.per_second == 0
