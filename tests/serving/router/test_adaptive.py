# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice in a simulated router: who answers a group when the machine is free."""

import heapq
import random
from collections import deque
from contextlib import nullcontext
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
    """A lane whose groups take simulated time; `slow` is how much longer than they should.

    All lanes run on one machine, which does one group after the other.
    """

    in_flight = decoders = 1

    def __init__(self, name, speed, simulation):
        self.service, self.pace = src.pace.ServiceTime(), src.pace.Pace()
        self.name, self.simulation, self.slow = name, simulation, 1.0
        self.unit_s = GROUP / speed / (FIXED + GROUP)
        self.waiting, self.until_s, self.group = deque(), None, []

    @property
    def idle(self):
        return self.until_s is None and not self.waiting

    @property
    def together(self):
        return nullcontext()

    def adapting_s(self):
        now, running = self.simulation.clock.now, self.until_s is not None and any(self.group)
        left = [max(0.0, self.until_s - now)] if running else []
        return left + [0.0] * -(-sum(one is not None for one in self.waiting) // GROUP)

    def ahead_of(self, ticket):
        now = self.simulation.clock.now
        left = max(0.0, self.until_s - now) if self.until_s else 0.0
        return src.lane.Waiting(left, float(len(self.waiting)), 0.0)

    def start(self):
        if self.until_s is not None or not self.waiting:
            return
        self.group = [self.waiting.popleft() for _ in range(min(GROUP, len(self.waiting)))]
        simulation, now = self.simulation, self.simulation.clock.now
        seconds = self.slow * self.unit_s * (FIXED + len(self.group))
        self.until_s = simulation.machine_s = max(now, simulation.machine_s) + seconds
        self.began_s = now
        simulation.at(self.until_s, self.end)

    def end(self):
        seconds, group = self.simulation.clock.now - self.began_s, self.group
        self.until_s, self.group = None, []
        self.service.add(len(group), seconds)
        for one in group:
            if one is not None:
                self.simulation.ended(one)
        self.simulation.adaptive.go_on()
        self.simulation.start()


class Simulation:
    """A router of three lanes in which deciding takes no time; requests have one row."""

    def __init__(self, clock, routes=None, seed=0):
        self.clock, self.routes = clock, routes or routes_of()
        self.lanes = {(name, ""): Lane(name, speed, self) for name, _, speed in VARIANTS}
        self.adaptive = src.adaptive.Adaptive(self.routes, self.lanes, self.release)
        self.events, self.count, self.rng = [], 0, random.Random(seed)
        self.machine_s = 0.0
        self.done = []  # arrival, choice, seconds; None: refused
        self.released = []

    def at(self, when_s, what, *arguments):
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, what, arguments))

    def ask(self, parameters=None, rows=1, *, unread=True, **fields):
        """Offer a request that arrives now; returns its choice if it does not have to wait."""
        wish = src.choose.wish_of(self.routes, parameters or {}, ())
        ticket = ticket_of(rows, self.clock.now)._replace(**fields)
        if unread:
            self.adaptive.check_arrival(wish, "", ticket.left_s, rows)
        self.released.clear()
        self.adaptive.offer(wish, ticket)
        return self.released[-1] if self.released else None

    def release(self, candidate, wish, ticket):
        self.released.append(ticket.adapted)
        one = SimpleNamespace(candidate=candidate, at=0, ticket=ticket)
        ends = len(candidate.routes) - 1
        if candidate.policy:
            draw, shares = self.rng.random(), SHARES[candidate.name]
            ends = next((at for at in range(ends) if draw < sum(shares[: at + 1])), ends)
        one.ends = ends
        self.lanes[candidate.routes[0].name, ""].waiting.append(one)

    def start(self):
        for lane in self.lanes.values():
            lane.start()

    def arrive(self):
        try:
            self.ask()
        except src.adaptive.Busy:
            self.done.append((self.clock.now, None, 0.0, False))
        self.start()

    def ended(self, one):
        if one.at < one.ends:
            one.at += 1
            self.lanes[one.candidate.routes[one.at].name, ""].waiting.append(one)
            return
        if one.candidate.policy:
            ended = [int(at == one.ends) for at in range(len(one.candidate.routes))]
            self.adaptive.forecast.learn(one.candidate.name, ended)
        begun_s = one.ticket.arrived_s
        waited_s = self.clock.now - begun_s
        self.done.append((begun_s, one.candidate.name, waited_s, one.ticket.adapted.degraded))

    def load(self, rate, seconds, burst=1):
        """Let requests arrive at random, some together; returns what became of them."""
        begin = when = self.clock.now
        while (when := when + self.rng.expovariate(rate / burst)) < begin + seconds:
            for _ in range(burst):
                self.at(when, self.arrive)
        self.at(begin + seconds, lambda: None)
        while self.events and self.events[0][0] <= begin + seconds:
            self.clock.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        return [one for one in self.done if begin <= one[0]]

    def measure(self):
        """Let every lane know what its groups take."""
        for lane in self.lanes.values():
            for _ in range(src.pace.AVERAGED_FROM):
                for rows in (1, GROUP):
                    lane.service.add(rows, lane.unit_s * (FIXED + rows))


def ticket_of(rows, now):
    return src.backlog.Ticket("", {}, rows, {}, (), None, None, now, work=float(rows))


def in_time(done):
    """Share of all requests that were answered within the objective."""
    return sum(choice is not None and waited <= SLO_S for _, choice, waited, _ in done) / len(done)


def degraded(done):
    """Share of the answers that a better candidate gives without load."""
    answers = [mark for _, choice, _, mark in done if choice is not None]
    return sum(answers) / len(answers)


def test_a_load_step_is_answered_with_less_compute_while_it_lasts(clock):
    simulation = Simulation(clock)
    before = simulation.load(50, 4)
    assert in_time(before) == 1 and degraded(before) == 0
    during = simulation.load(700, 4)
    assert in_time(during) > 0.99 and degraded(during) > 0.9
    fell_s = clock.now
    after = simulation.load(50, 6)
    assert in_time(after) == 1
    assert degraded([one for one in after if one[0] > fell_s + 0.3]) == 0


@pytest.mark.parametrize("rate", [110, 130, 180])
def test_a_load_just_above_the_capacity_is_in_time_and_mostly_not_degraded(clock, rate):
    simulation = Simulation(clock, routes_of(policies=False), seed=1)
    done = simulation.load(rate, 20)
    assert in_time(done) > 0.99
    assert degraded(done) < 2 * (1 - 100 / rate) + 0.2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bursts_of_a_load_that_fits_cost_only_themselves(clock, seed):
    """Requests that wait for the full model would be late after a burst; they do not wait there."""
    simulation = Simulation(clock, routes_of(policies=False), seed=seed)
    simulation.load(20, 2)
    done = simulation.load(60, 20, burst=12)
    assert in_time(done) > 0.99
    assert degraded(done) < 0.6
    quiet = simulation.load(20, 3)
    assert degraded([one for one in quiet if one[0] > clock.now - 2]) == 0


def test_nothing_is_given_to_a_lane_while_a_group_runs(clock):
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.measure()
    assert simulation.ask().choice == "full"
    simulation.start()
    assert simulation.ask() is None and simulation.ask() is None
    simulation.lanes["full", ""].end()
    assert [one.choice for one in simulation.released] == ["full", "full"], "as one group"


@pytest.mark.parametrize(
    ("others", "choice"), [(0, "full"), (GROUP, "full"), (2 * GROUP, "half"), (9 * GROUP, "small")]
)
def test_the_choice_counts_the_deadlines_of_all_that_wait(clock, others, choice):
    """Full groups take 80, 40 and 8 ms, and 180 ms may pass."""
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.measure()
    simulation.ask()
    simulation.start()
    for _ in range(GROUP + others):
        simulation.ask()
    simulation.lanes["full", ""].end()
    assert {one.choice for one in simulation.released[:GROUP]} == {choice}


def test_what_is_late_already_does_not_cost_the_others_quality(clock):
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.measure()
    simulation.ask()
    simulation.start()
    simulation.ask()
    clock.now += 2 * SLO_S
    simulation.ask()
    simulation.lanes["full", ""].end()
    assert [one.choice for one in simulation.released] == ["full", "full"]


def test_large_images_go_to_a_lane_to_be_decoded_while_they_wait(clock):
    simulation = Simulation(clock)
    simulation.measure()
    simulation.ask()
    simulation.start()
    assert simulation.ask(megapixels=12.0) is not None
    assert simulation.ask() is None


def test_a_large_request_does_not_lower_the_others(clock):
    simulation = Simulation(clock)
    simulation.load(20, 2)
    clock.now += 2.1  # even if the full model's lane was not measured lately
    assert simulation.ask(rows=64).degraded
    for lane in simulation.lanes.values():
        lane.waiting.clear()
    assert simulation.ask().choice == "full"


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
    assert degraded(simulation.load(60, 3)) > 0.3
    for lane in simulation.lanes.values():
        lane.slow = 1.0
    done = simulation.load(60, 8)
    assert degraded([one for one in done if one[0] > clock.now - 4]) < 0.05


def test_other_requests_in_a_lane_count(clock):
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.measure()
    simulation.lanes["full", ""].waiting.extend([None] * 3 * GROUP)  # for a named budget
    assert simulation.ask().choice == "half"


def test_what_nothing_can_answer_in_time_is_refused_with_a_hint(clock):
    simulation = Simulation(clock)
    simulation.measure()
    simulation.ask()
    simulation.start()
    taken = 0
    with pytest.raises(
        src.adaptive.Busy, match=r"model 'nac' is busy.*within 200 ms.*'small'.*try again in ab"
    ):
        while taken < 1000:
            simulation.ask()
            taken += 1
    assert 80 < taken < 180, "as many as the cheapest answers until then"
    with pytest.raises(src.adaptive.Busy):  # without another look
        simulation.ask()
    simulation.lanes["full", ""].end()
    simulation.load(1, 3)
    with pytest.raises(src.adaptive.Busy, match="send less in one request, or allow more time"):
        simulation.ask(rows=40_000)
    assert simulation.ask()


def test_few_that_wait_take_less_than_a_full_group(clock):
    routes = routes_of(policies=False)
    small = routes.variants[-1]._replace(run_batch=1024)  # all of them together would be late
    simulation = Simulation(clock, routes._replace(variants=(*routes.variants[:-1], small)))
    simulation.measure()
    for _ in range(4):  # none is refused
        simulation.ask()
        simulation.start()
    assert simulation.adaptive._backlog.requests == 3


def test_time_in_the_servers_queue_counts(clock):
    simulation = Simulation(clock, routes_of(policies=False))
    simulation.measure()
    lag = [0.0]
    simulation.adaptive._lag_s = lambda: lag[0]

    def alone():
        for lane in simulation.lanes.values():
            lane.waiting.clear()
        return simulation.ask(rows=8).choice

    assert alone() == "full"
    lag[0] = 0.65 * SLO_S
    assert alone() == "half", "80 ms are too much of what is left of 200"
    lag[0] = SLO_S
    with pytest.raises(src.adaptive.Busy, match=r"waited about 200 ms in the server's queue"):
        simulation.ask()


def test_the_callers_own_time_is_a_limit_too(clock):
    simulation = Simulation(clock)
    simulation.measure()
    with pytest.raises(src.adaptive.Busy, match=r"within 0\.1 ms"):
        simulation.ask(deadline_s=clock.now + 1e-4)
    # The server's queue is not subtracted again from what is left of the caller's time.
    simulation.adaptive._lag_s = lambda: SLO_S
    given = {"max_latency_ms": 1e5 * SLO_S}
    left = {"deadline_s": clock.now + SLO_S, "unread": False}
    assert simulation.ask(given, **left).choice == "full"


def test_what_waits_is_refused_when_its_time_has_run_out(clock, monkeypatch):
    refused = []
    monkeypatch.setattr(src.adaptive, "refuse", lambda sender, text, why: refused.append(why))
    simulation = Simulation(clock)
    simulation.measure()
    simulation.ask()
    simulation.start()
    sender = SimpleNamespace(waited=lambda seconds: None)
    simulation.ask(deadline_s=clock.now + 0.1, sender=sender)
    simulation.adaptive.expire()
    assert not refused
    clock.now += 0.2
    simulation.adaptive.expire()
    assert refused == [src.outcomes.TIMEOUT]


def test_what_a_lane_has_refused_is_not_waited_for(clock):
    """No group of it ends, such as one of the second step of a policy whose time has run out."""
    simulation = Simulation(clock)
    simulation.measure()
    simulation.ask()
    assert simulation.ask() is None
    simulation.lanes["full", ""].waiting.clear()
    simulation.adaptive.expire()
    assert [one.choice for one in simulation.released] == ["full"]


def test_a_choice_that_fails_costs_its_own_requests_only(clock, monkeypatch):
    failed = []
    monkeypatch.setattr(src.adaptive, "fail", lambda sender, text, error: failed.append(error))
    simulation = Simulation(clock)
    simulation.measure()
    monkeypatch.setattr(simulation.adaptive, "_chosen", lambda *_: 1 / 0)
    assert simulation.ask() is None and len(failed) == 1
    monkeypatch.undo()
    assert simulation.ask() is not None


def test_all_that_waits_is_given_to_lanes_before_they_close(clock):
    simulation = Simulation(clock)
    simulation.measure()
    simulation.ask()
    simulation.start()
    for _ in range(3 * GROUP):
        simulation.ask()
    simulation.released.clear()
    simulation.adaptive.close()
    assert len(simulation.released) == 3 * GROUP


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


def test_kinds_do_not_grow_with_the_objectives_of_callers(clock):
    simulation = Simulation(clock)
    for count in range(1, 200):
        simulation.ask({"max_latency_ms": count * 7.77})
    assert len(simulation.adaptive._objectives) <= src.adaptive.MOST_OBJECTIVES
