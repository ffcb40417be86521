# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice in a simulated router: forecasts, levels that neither flap nor stay low."""

import heapq
import random
from collections import deque
from types import SimpleNamespace

import pytest
from support.serving.routers import src, variant_route

SLO_S = 0.2
# name, budget, rows per second of its lane in full groups
VARIANTS = (("full", 1.0, 100.0), ("half", 0.5, 200.0), ("small", 0.125, 1000.0))
GROUP, FIXED = 8, 4.0  # rows per group, and the fixed part of a group in rows
SHARES = {"safe": [0.5, 0.3, 0.2], "cheap": [0.8, 0.2]}


def route_of(name, budget, speed):
    figures = {"budget": budget, "setting": name, "inferences_per_second": speed}
    return src.routes.Route(**variant_route(name, run_batch=GROUP, **figures))


def policy_of(name, risk, seconds, chain):
    steps = tuple(
        src.routes.StepRoute(variant, variant, 0.5 if variant != chain[-1] else None, 1.0)
        for variant in chain
    )
    return src.routes.PolicyRoute(name, "full", 0.95, risk, risk, "top1", "full", seconds, steps)


def routes_of(floor=None, slo_ms=1e3 * SLO_S, policies=True):
    made = (
        policy_of("safe", 0.01, 0.4, ("small", "half", "full")),
        policy_of("cheap", 0.05, 0.2, ("small", "half")),
    )
    shares = SHARES if policies else {}
    return src.routes.Routes(
        model="nac", family="nac", preprocessing=None, components={},
        variants=tuple(route_of(*each) for each in VARIANTS),
        policies=made if policies else (),
        adaptive=src.routes.AdaptiveRules(slo_ms, floor, shares) if slo_ms else None,
    )  # fmt: skip


class Lane:
    """A lane whose groups take simulated time; `slow` is how much longer than they should."""

    in_flight = decoders = 1

    def __init__(self, name, speed, simulation):
        self.service, self.other_busy = src.pace.ServiceTime(), src.pace.Rate()
        self.pace, self.decoding = src.pace.Pace(), src.pace.Mean()
        self.name, self.simulation, self.slow = name, simulation, 1.0
        self.unit_s = GROUP / speed / (FIXED + GROUP)
        self.waiting, self.until_s, self.group = deque(), None, []

    @property
    def idle(self):
        return self.until_s is None and not self.waiting

    def ahead_of(self, ticket):
        now = self.simulation.clock.now
        left = max(0.0, self.until_s - now) if self.until_s else 0.0
        return src.lane.Waiting(left, float(len(self.waiting)), 0.0)

    def offer(self, one):
        self.waiting.append(one)
        self.start()

    def start(self):
        if self.until_s is not None or not self.waiting:
            return
        self.group = [self.waiting.popleft() for _ in range(min(GROUP, len(self.waiting)))]
        self.began_s = self.simulation.clock.now
        seconds = self.slow * self.unit_s * (FIXED + len(self.group))
        self.until_s = self.began_s + seconds
        self.simulation.at(self.until_s, self.end)

    def end(self):
        seconds, group = self.simulation.clock.now - self.began_s, self.group
        self.until_s, self.group = None, []
        self.service.add(len(group), seconds)
        for one in group:
            self.simulation.go_on(one)
        self.start()


class Simulation:
    """A router of three lanes in which deciding takes no time; requests have one row."""

    def __init__(self, clock, routes=None, seed=0):
        self.clock, self.routes = clock, routes or routes_of()
        self.lanes = {(name, ""): Lane(name, speed, self) for name, _, speed in VARIANTS}
        self.adaptive = src.adaptive.Adaptive(self.routes, self.lanes)
        self.events, self.count, self.rng = [], 0, random.Random(seed)
        self.done = []  # arrival, choice, milliseconds; None: refused
        self.levels = []  # when the level changed, and to what
        self.parameters = {}

    def at(self, when_s, what, *arguments):
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, what, arguments))

    def ask(self, parameters=None, rows=1):
        """Decide on a request that arrives now."""
        wish = src.choose.wish_of(self.routes, parameters or {}, ())
        ticket = ticket_of(rows, self.clock.now)
        self.adaptive.check_arrival(wish, "", ticket.left_s, rows)
        return self.adaptive.choose(wish, ticket)

    def arrive(self):
        now = self.clock.now
        try:
            candidate, adapted = self.ask(self.parameters)
        except src.adaptive.Busy:
            self.done.append((now, None, 0.0, False))
        else:
            ends = len(candidate.routes) - 1
            if candidate.policy:
                draw, shares = self.rng.random(), SHARES[candidate.name]
                ends = next((at for at in range(ends) if draw < sum(shares[: at + 1])), ends)
            one = SimpleNamespace(since_s=now, candidate=candidate, at=0, ends=ends)
            one.degraded = adapted.degraded
            self.lanes[candidate.routes[0].name, ""].offer(one)
        (level,) = self.adaptive._levels.values()
        if not self.levels or self.levels[-1][1] != level.at:
            self.levels.append((now, level.at))

    def go_on(self, one):
        if one.at < one.ends:
            one.at += 1
            self.lanes[one.candidate.routes[one.at].name, ""].offer(one)
            return
        if one.candidate.policy:
            ended = [int(at == one.ends) for at in range(len(one.candidate.routes))]
            self.adaptive.forecast.learn(one.candidate.name, ended)
        waited = self.clock.now - one.since_s
        self.done.append((one.since_s, one.candidate.name, waited, one.degraded))

    def load(self, rate, seconds):
        """Let requests arrive at random; returns what became of them."""
        begin = when = self.clock.now
        while (when := when + self.rng.expovariate(rate)) < begin + seconds:
            self.at(when, self.arrive)
        self.at(begin + seconds, lambda: None)
        while self.events and self.events[0][0] <= begin + seconds:
            self.clock.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        return [one for one in self.done if begin <= one[0]]


def ticket_of(rows, now):
    return src.backlog.Ticket("", {}, rows, {}, (), None, None, now, work=float(rows))


def in_time(done):
    """Share of all requests that were answered within the objective."""
    return sum(choice is not None and waited <= SLO_S for _, choice, waited, _ in done) / len(done)


def degraded(done):
    """Share of the answers that a better candidate gives without load."""
    answers = [mark for _, choice, _, mark in done if choice is not None]
    return sum(answers) / len(answers)


def test_a_load_step_is_answered_with_less_compute_and_then_recovers(clock):
    simulation = Simulation(clock)
    before = simulation.load(50, 4)
    assert in_time(before) == 1 and degraded(before) == 0
    during = simulation.load(800, 4)
    assert in_time(during) > 0.95 and degraded(during) > 0.9
    assert len(simulation.levels) <= 5, "it goes down at most once per candidate"
    fell_s, _ = clock.now, simulation.levels.clear()
    after = simulation.load(50, 6)
    assert in_time(after) > 0.95
    assert simulation.levels[-1][1] == 0 and simulation.levels[-1][0] - fell_s < 3
    assert degraded([one for one in after if one[0] > fell_s + 3]) == 0
    assert len(simulation.levels) <= 5


@pytest.mark.parametrize("rate", [110, 130])
def test_a_load_just_above_the_capacity_does_not_oscillate(clock, rate):
    simulation = Simulation(clock, seed=1)
    done = simulation.load(rate, 20)
    assert in_time(done) > 0.98
    assert len(simulation.levels) <= 2 + 2 * 20 / 2.5, simulation.levels
    assert degraded(done) > 0.6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bursts_of_a_load_that_fits_do_not_lower_the_level(clock, seed):
    simulation = Simulation(clock, seed=seed)
    simulation.load(20, 2)
    simulation.load(800, 3)
    simulation.load(80, 2)
    (level,) = simulation.adaptive._levels.values()
    assert level.at == 0
    done = simulation.load(80, 20)  # four fifths of what the full model sustains
    assert in_time(done) > 0.99 and degraded(done) < 0.02


def test_a_burst_lowers_its_own_requests_only(clock):
    simulation = Simulation(clock)
    simulation.load(20, 4)
    for _ in range(25):
        simulation.arrive()
    (level,) = simulation.adaptive._levels.values()
    assert level.at == 0
    quiet = simulation.load(20, 3)
    assert in_time(quiet) == 1
    assert degraded([one for one in quiet if one[0] > clock.now - 2]) == 0


def test_a_load_that_has_gone_does_not_lower_the_level(clock):
    simulation = Simulation(clock)
    simulation.load(20, 4)
    (level,) = simulation.adaptive._levels.values()
    level.lasting.add(1000)
    simulation.lanes["full", ""].until_s = clock.now + SLO_S  # something else, for a moment
    assert simulation.ask()[0].name != "full" and level.at == 0
    level.demand.add(1000)
    clock.now += 0.05
    assert simulation.ask()[0].name != "full" and level.at > 0


def test_a_large_request_does_not_lower_the_others(clock):
    simulation = Simulation(clock)
    simulation.load(20, 2)
    clock.now += 2.1  # even if the full model's lane was not measured lately
    candidate, adapted = simulation.ask(rows=64)
    assert adapted.degraded and candidate.name != "full"
    assert simulation.ask()[0].name == "full"


@pytest.mark.parametrize("slow", [4.0, 8.0])  # with 8, not even one request alone is in time
def test_a_lane_that_was_slow_from_the_beginning_is_tried_again(clock, slow):
    simulation = Simulation(clock, routes_of(policies=False))
    for lane in simulation.lanes.values():
        lane.slow = slow
    simulation.load(60, 3)
    assert degraded(simulation.done) > 0.5
    for lane in simulation.lanes.values():
        lane.slow = 1.0
    simulation.done.clear()
    done = simulation.load(30, 8)
    assert degraded([one for one in done if one[0] > clock.now - 2]) == 0


def test_what_was_measured_under_a_load_that_has_gone_is_measured_again(clock):
    simulation = Simulation(clock)
    simulation.load(30, 2)
    for lane in simulation.lanes.values():
        lane.slow = 4.0  # such as by other programs
    simulation.load(60, 3)
    (level,) = simulation.adaptive._levels.values()
    assert level.at > 0
    for lane in simulation.lanes.values():
        lane.slow = 1.0
    simulation.load(60, 8)
    assert level.at == 0


def test_other_requests_in_a_lane_count(clock):
    simulation = Simulation(clock)
    simulation.load(50, 4)
    (level,), one = simulation.adaptive._levels.values(), ticket_of(1, clock.now)
    assert simulation.adaptive._fits(level, 0, one, SLO_S, src.adaptive.EASY_LOAD)
    before = simulation.adaptive._load(level, 0, one)
    simulation.lanes["full", ""].other_busy.add(0.6 * src.pace.RATE_WINDOW_S)  # for a named budget
    assert simulation.adaptive._load(level, 0, one) == pytest.approx(before + 0.6)
    assert not simulation.adaptive._fits(level, 0, one, SLO_S, src.adaptive.EASY_LOAD)


def test_what_nothing_can_answer_in_time_is_refused_with_a_hint(clock):
    simulation = Simulation(clock)
    simulation.load(50, 2)
    for lane in simulation.lanes.values():
        lane.service.add(GROUP, lane.unit_s * (FIXED + GROUP))
        lane.waiting.extend([None] * 2000)
    with pytest.raises(
        src.adaptive.Busy, match=r"model 'nac' is busy.*within 200 ms.*'small'.*try again in ab"
    ):
        simulation.ask()
    for lane in simulation.lanes.values():
        lane.waiting.clear()
    clock.now += 1
    with pytest.raises(src.adaptive.Busy, match="send less in one request, or allow more time"):
        simulation.ask(rows=40_000)
    assert simulation.ask()


@pytest.mark.parametrize("at, answers", [(0, "full"), (1, "small"), (2, "small")])
def test_what_no_other_candidate_would_take_needs_less_reserve(clock, at, answers):
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.load(50, 2)
    for lane in simulation.lanes.values():
        lane.service.add(GROUP, lane.unit_s * (FIXED + GROUP))
    (level,), one = simulation.adaptive._levels.values(), ticket_of(1, clock.now)
    level.fall(at, clock.now)
    lane = simulation.lanes[level.current.name, ""]
    alone_s = simulation.adaptive.forecast.answer_s(level.current, one)
    lane.until_s = clock.now + 0.85 * SLO_S - alone_s
    assert simulation.ask()[0].name == answers


def test_time_in_the_servers_queue_counts(clock):
    simulation = Simulation(clock)
    simulation.load(30, 2)
    lag = [0.0]
    simulation.adaptive._lag_s = lambda: lag[0]
    assert simulation.ask()[0].name == "full"
    lag[0] = 0.1 * SLO_S
    assert simulation.ask()[0].name == "full"
    lag[0] = 0.5 * SLO_S
    names = []
    for _ in range(6):
        clock.now += 0.11
        names.append(simulation.ask()[0].name)
    assert names == ["safe", "cheap", "half", "small", "small", "small"]
    lag[0] = SLO_S
    with pytest.raises(src.adaptive.Busy):
        simulation.ask()
    lag[0] = 0.0
    simulation.load(30, 3)
    assert simulation.ask()[0].name == "full"


def test_the_callers_own_time_is_a_limit_too(clock):
    simulation = Simulation(clock)
    simulation.load(50, 2)
    hurried = ticket_of(1, clock.now)._replace(deadline_s=clock.now + 1e-4)
    with pytest.raises(src.adaptive.Busy, match=r"within 0\.1 ms"):
        simulation.adaptive.choose(src.choose.wish_of(simulation.routes, {}, ()), hurried)
    # The server's queue is not subtracted again from what is left of the caller's time.
    wish = src.choose.wish_of(simulation.routes, {}, ())._replace(slo_s=100 * SLO_S)
    left = ticket_of(1, clock.now)._replace(deadline_s=clock.now + SLO_S)
    simulation.adaptive._lag_s = lambda: SLO_S
    assert simulation.adaptive.choose(wish, left)[0].name == "full"


NAMES = {
    "nothing": ({}, ("full", "safe", "cheap", "half", "small")),
    "its own time": ({"max_latency_ms": 20}, ("full", "safe", "cheap", "half", "small")),
    "a risk": ({"max_risk": "0.02"}, ("full model", "safe")),
    "a large risk": ({"max_risk": 0.5}, ("full model", "safe", "cheap")),
    "no risk": ({"max_risk": 0}, ("full model",)),
    "a policy": ({"policy": "safe"}, ("safe",)),
    "a cheap policy": ({"policy": "cheap", "max_latency_ms": "20"}, ("cheap",)),
}


@pytest.mark.parametrize("case", NAMES)
def test_candidates(pb, case):
    parameters, names = NAMES[case]
    routes = routes_of()
    wish = src.choose.wish_of(routes, parameters, ())
    assert tuple(one.name for one in src.choose.candidates_of(routes, wish)) == names
    assert wish.slo_s == (0.02 if "max_latency_ms" in parameters else SLO_S)


@pytest.mark.parametrize("floor, smallest", [(0.125, "small"), (0.3, "half"), (0.5, "half")])
def test_no_variant_below_the_floor(pb, floor, smallest):
    found = src.choose.by_quality(routes_of(floor))
    assert [one.name for one in found][:3] == ["full", "safe", "cheap"]
    assert found[-1].name == smallest and not found[-1].certified and found[0].certified


@pytest.mark.parametrize(
    "parameters, slo_ms",
    [
        ({"budget": 0.5}, 50), ({"min_score": 0.5}, 50), ({"budget": 1, "timeout": 5}, 50),
        ({}, None), ({"max_latency_ms": 5}, None), ({"policy": "safe"}, None),
    ],
)  # fmt: skip
def test_what_does_not_adapt(pb, parameters, slo_ms):
    assert src.choose.wish_of(routes_of(slo_ms=slo_ms), parameters, ()) is None


def test_a_requests_own_objective_needs_no_repository_with_one(pb):
    wish = src.choose.wish_of(routes_of(slo_ms=None), {"max_risk": 0.1, "max_latency_ms": 20}, ())
    assert wish.slo_s == 0.02 and wish.risk == 0.1


@pytest.mark.parametrize(
    "parameters, words",
    [
        ({"max_latency_ms": 0}, "max_latency_ms is 0, expected a finite number above 0"),
        ({"policy": "lunch"}, "unknown policy 'lunch'"),
        ({"policy": "safe", "max_risk": 0.1}, "max_risk and policy are given"),
        ({"colour": 1}, "unknown parameter 'colour'"),
        ({"strict": True}, "found parameter strict without policy"),
    ],
)
def test_refused(pb, parameters, words):
    with pytest.raises(src.choose.RequestRefused, match=words):
        src.choose.wish_of(routes_of(), parameters, ())


def test_an_objective_with_a_budget_is_two_choices(pb):
    parameters = {"budget": 1, "max_latency_ms": 5}
    assert src.choose.wish_of(routes_of(), parameters, ()) is None
    with pytest.raises(src.choose.RequestRefused, match="budget and max_latency_ms are given"):
        src.choose.choose(routes_of(), parameters)


def test_levels_do_not_grow_with_the_objectives_of_callers(clock):
    simulation = Simulation(clock)
    for count in range(1, 200):
        simulation.ask({"max_latency_ms": count * 7.77})
    assert len(simulation.adaptive._levels) <= src.adaptive.MOST_LEVELS
