# SPDX-License-Identifier: Apache-2.0
"""What a choice by load is made of: forecasts, and the share that goes on."""

import pytest
from support.serving.routers import src
from test_adaptive import Simulation, routes_of, ticket_of


def test_the_time_of_a_group(clock):
    service = src.pace.ServiceTime()
    assert service.seconds(8) == 0
    for rows in (1, 8, 4, 2, 8, 1, 6, 3) * 4:
        service.add(rows, 0.004 + 0.001 * rows)
        clock.now += 0.01
    assert service.seconds(1) == pytest.approx(0.005, rel=0.02)
    assert service.seconds(8) == pytest.approx(0.012, rel=0.02)
    service.add(8, 5.0)  # a process that was stopped for seconds
    assert service.seconds(8) < 0.025
    for _ in range(8):
        service.add(8, 0.1)
        clock.now += 0.1
    assert service.seconds(8) == pytest.approx(0.1, rel=0.2)
    clock.now += 10
    assert service.seconds(8) < 0.02, "a rested lane is as fast as it ever was"


def test_a_lane_that_stays_slow_is_tried_less_and_less(clock):
    service = src.pace.ServiceTime()
    for _ in range(src.pace.AVERAGED_FROM):
        assert service.unsure
        service.add(1, 1.0)
    rests = []
    for _ in range(7):
        began_s = clock.now
        while not service.unsure:
            clock.now += 0.25
        rests.append(clock.now - began_s)
        service.add(1, 1.0)
    assert rests[:3] == pytest.approx(
        [src.pace.RETRY_S, 2 * src.pace.RETRY_S, 4 * src.pace.RETRY_S], abs=0.3
    )
    assert rests[-1] == pytest.approx(src.pace.LONGEST_RETRY_S, abs=0.3)
    clock.now += 2 * src.pace.LONGEST_RETRY_S
    service.add(1, 0.1)
    clock.now += src.pace.RETRY_S + 0.1
    assert service.unsure and service.seconds(1) == pytest.approx(0.1, rel=0.1)


def test_a_request_of_more_rows_than_a_group_is_a_group_of_its_own(clock):
    """Such as of the full model, which is often the fastest image by image."""
    routes = routes_of()
    single = tuple(route._replace(run_batch=1) for route in routes.variants)
    simulation = Simulation(clock, routes._replace(variants=single))
    full, forecast = simulation.lanes["full", ""], simulation.adaptive.forecast
    for _ in range(20):
        full.service.add(4, 0.02)
        clock.now += 0.05
    candidate = src.choose.Candidate("full", single[:1])
    full.waiting.extend([None] * 8)
    assert forecast.answer_s(candidate, ticket_of(4, clock.now)) == pytest.approx(0.06)


def test_the_share_that_goes_on_is_learned(pb):
    reach = src.forecast.Reach(3, [0.5, 0.3, 0.2])
    assert reach.shares == pytest.approx([1, 0.5, 0.2])
    for _ in range(1000):
        reach.add([0, 5, 5])
    assert reach.shares == pytest.approx([1, 1, 0.5], abs=0.03)
    assert src.forecast.Reach(3).shares == [1, 0.5, 0.25]
