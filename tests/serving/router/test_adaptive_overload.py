# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice far beyond the capacity, where the variants share the machine's cores."""

import pytest
from support.serving.routers import src
from test_adaptive import SLO_S, Simulation, degraded

CARRIED = 1000.0  # rows per second of the cheapest variant, if nothing else runs


@pytest.fixture
def simulation(clock):
    made = Simulation(clock)
    made.forecasts, forecast = 0, made.adaptive.forecast

    def counted(own):
        def count(*arguments):
            made.forecasts += 1
            return own(*arguments)

        return count

    forecast._sum = counted(forecast._sum)
    return made


def test_a_hopeless_load_gets_as_many_answers_as_the_cheapest_variant_has(simulation):
    simulation.load(30, 2)
    simulation.load(8 * CARRIED, 1)
    began_s = simulation.clock.now
    simulation.load(8 * CARRIED, 1)
    fell_s = simulation.clock.now
    answers = [one for one in simulation.done if one[1] and began_s < one[0] + one[2] <= fell_s]
    assert {choice for _, choice, _, _ in answers} == {"small"}
    assert all(waited <= SLO_S for _, _, waited, _ in answers)
    assert len(answers) > 0.95 * CARRIED
    after = simulation.load(30, 6)
    assert degraded([one for one in after if one[0] > fell_s + 5]) == 0


def test_first_calls_that_were_slow_do_not_end_all_answers(simulation):
    """A load that begins at once: the first calls of a model are slow, most of all if all run."""
    for lane in simulation.lanes.values():
        for _ in range(2):
            lane.service.add(1.0, 2 * SLO_S)
    simulation.load(8 * CARRIED, 1)
    began_s = simulation.clock.now
    simulation.load(8 * CARRIED, 1)
    answers = [one for one in simulation.done if one[1] and one[0] + one[2] > began_s]
    assert len(answers) > 0.95 * CARRIED


@pytest.mark.parametrize("calls", [2, 50])
def test_a_variant_that_seems_too_slow_is_tried_again(simulation, calls):
    for lane in simulation.lanes.values():
        for _ in range(calls):
            lane.service.add(1.0, 2 * SLO_S)
    if calls > 2:
        with pytest.raises(src.adaptive.Busy):
            simulation.ask()
        simulation.clock.now += 2.1
    assert simulation.ask().choice == "small"
    simulation.adaptive._lag_s = lambda: SLO_S
    with pytest.raises(src.adaptive.Busy):
        simulation.ask()
    simulation.adaptive._lag_s = lambda: 0.0
    simulation.lanes["small", ""].waiting.append(None)
    simulation.clock.now += 0.1
    with pytest.raises(src.adaptive.Busy):
        simulation.ask()


def test_a_request_needs_few_forecasts_also_under_overload(simulation):
    """Counted, not timed: the router decides in one thread, and a refusal must be cheap."""
    for rate, most in ((50, 8.0), (130, 8.0), (8 * CARRIED, 1.5)):
        simulation.load(rate, 1)
        simulation.forecasts = 0
        done = simulation.load(rate, 1)
        assert simulation.forecasts <= most * len(done), rate


def arrival(simulation, left_s=float("inf"), rows=1):
    simulation.adaptive.check_arrival(
        src.choose.wish_of(simulation.routes, {}, ()), "", left_s, rows
    )


def test_what_is_late_on_arrival_is_refused_without_a_forecast(simulation):
    simulation.load(30, 2)
    simulation.forecasts, lag = 0, [0.7 * SLO_S]
    simulation.adaptive._lag_s = lambda: lag[0]
    arrival(simulation)
    with pytest.raises(
        src.adaptive.Busy, match=r"about 140 ms in the server's queue.*of 150 ms; try again"
    ):
        arrival(simulation, left_s=0.75 * SLO_S)
    lag[0] = 0.9 * SLO_S
    for _ in range(5):
        simulation.clock.now += 0.11
        with pytest.raises(src.adaptive.Busy):
            arrival(simulation)
    assert simulation.forecasts == 0
    lag[0] = 0.0
    arrival(simulation)
    assert degraded(simulation.load(30, 4)) == 0


def test_a_refusal_is_repeated_before_the_inputs_are_read(simulation):
    """Not for requests of fewer rows, which may still fit."""
    simulation.load(30, 2)
    small = simulation.lanes["small", ""]
    for lane in simulation.lanes.values():
        lane.waiting.extend([None] * 2000)
    with pytest.raises(src.adaptive.Busy):
        simulation.ask(rows=4)
    small.waiting.clear()
    simulation.forecasts = 0
    for rows in (4, 5):
        with pytest.raises(
            src.adaptive.Busy, match=r"found no way to answer this request within 150 ms"
        ):
            arrival(simulation, left_s=0.75 * SLO_S, rows=rows)
    arrival(simulation, rows=3)
    assert simulation.forecasts == 0
    simulation.clock.now += 0.1
    arrival(simulation, rows=4)
