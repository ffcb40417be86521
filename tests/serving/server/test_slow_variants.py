# SPDX-License-Identifier: Apache-2.0
"""A batch of ten seconds is work: time limits that follow the pace, on clocks that a test moves."""

from itertools import cycle
from types import SimpleNamespace

import pytest

from saccade.serving.client import readiness as probe_module
from saccade.serving.client.readiness import Board, Probe, Prober, longest_batch_s
from saccade.serving.server import liveness as liveness_module
from saccade.serving.server import supervisor as supervisor_module
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.liveness import REST_TIMES, Liveness
from saccade.serving.server.process import MOST_TIMES, StartLimit
from saccade.serving.server.supervisor import Supervisor

LIMIT_S = 60.0


def statistics(*batches, last_s=0.0):
    """What the server says: size, number and seconds of each kind of batch."""
    stats = [
        SimpleNamespace(
            batch_size=size,
            compute_infer=SimpleNamespace(count=count, ns=int(1e9 * seconds * count)),
        )
        for size, count, seconds in batches
    ]
    return SimpleNamespace(batch_stats=stats, last_inference=int(1e3 * last_s))


@pytest.mark.parametrize(
    ("batches", "longest_s"),
    [
        ((), 0.0),
        (((1, 5, 0.001),), 0.064),
        (((1, 5, 10.0),), 640.0),
        (((1, 5, 10.0), (8, 2, 10.0)), 80.0),  # the largest one tells the most
        (((64, 1, 10.0), (8, 2, 9.0)), 10.0),
        (((64, 0, 0.0), (8, 2, 9.0)), 72.0),
    ],
)
def test_the_longest_batch_follows_from_those_that_were_run(batches, longest_s):
    assert longest_batch_s(statistics(*batches)) == pytest.approx(longest_s)


@pytest.mark.parametrize(
    ("batch_s", "ago_s", "out_s", "at_work"),
    [
        (0.001, 1.9, 9.0, True),
        (0.001, 2.1, 9.0, False),  # a fast model that hangs is noticed as before
        (10.0, 29.0, 100.0, True),
        (10.0, 31.0, 100.0, False),
        (10.0, 10_000.0, 29.0, True),  # nobody has asked for hours: the probe itself takes it
    ],
)
def test_a_model_is_at_work_as_long_as_its_batches_take(
    monkeypatch, batch_s, ago_s, out_s, at_work
):
    now = SimpleNamespace(monotonic=lambda: 5000.0, time=lambda: 100_000.0)
    stats = statistics((64, 1, batch_s), last_s=100_000.0 - ago_s)
    answer = SimpleNamespace(model_stats=[stats])
    client = SimpleNamespace(get_inference_statistics=lambda *_, **__: answer)
    monkeypatch.setattr(probe_module, "connect_alone", lambda _: client)
    monkeypatch.setattr(probe_module, "time", now)
    prober = Prober("nowhere", 2.0)
    prober._asked["v"] = 5000.0 - out_s
    assert prober.is_at_work("v") == at_work


def test_a_model_is_not_kept_busy_by_its_probes(monkeypatch):
    clock, asked = SimpleNamespace(now=1000.0), []
    place = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(liveness_module, "time", place)
    answers: list[Probe] = []
    prober = SimpleNamespace(
        ask=lambda model: asked.append(model) or True,
        answers=lambda: [answers.pop()] if answers else [],
        late=dict,
        timeout_s=2.0,
    )
    process = SimpleNamespace(stubs_of=lambda _: [])
    liveness = Liveness(process, prober, Board("m", ("v",)), 5.0)

    def probes(seconds):
        asked.clear()
        for _ in range(int(seconds)):
            clock.now += 1
            liveness.look()
        return asked.count("v")

    assert 10 <= probes(60) <= 14
    answers.append(Probe("v", seconds=10.0))
    assert probes(10.0 * REST_TIMES - 5) == 0
    assert probes(20) >= 1


def test_only_time_without_progress_ends_a_start():
    clock, used = SimpleNamespace(now=0.0), SimpleNamespace(s=0.0)
    limit = StartLimit(lambda: used.s, lambda: clock.now)

    def over_after(seconds, share):
        for _ in range(int(seconds)):
            clock.now += 1
            used.s += share
            if limit.is_over(LIMIT_S):
                return True
        return False

    assert not over_after(LIMIT_S - 5, 0.01)
    assert not over_after(2 * LIMIT_S, 0.5)
    assert not over_after(LIMIT_S - 5, 0.01)
    assert over_after(10, 0.01)
    assert "without progress, expected at most 60" in limit.text(LIMIT_S)
    clock.now, used.s = 0.0, 0.0
    limit = StartLimit(lambda: used.s, lambda: clock.now)
    assert not over_after(MOST_TIMES * LIMIT_S, 1.0)
    assert over_after(2, 1.0)


class Lanes:
    """A prober of a router whose lanes have finished so many groups at each look.

    `late` is how many looks it takes until the router says anything. Several processes of a router
    answer in turn.
    """

    def __init__(self, *looks, late=0, routers=1):
        self.looks, self.forget = list(looks), lambda _: None
        self.turns = cycle(range(routers))
        self.late, self.asked = late, []

    def ask(self, model):
        self.asked.append(model)
        return True

    def answers(self, _):
        if self.late:
            self.late -= 1
            return []
        look = self.looks.pop(0)
        lanes = look if isinstance(look[0], tuple) else (look,)
        names, turn = ("groups", "waiting", "running_s"), next(self.turns)
        return [
            Probe("v"),
            Probe("m", lanes=tuple(
                {
                    "router": f"m_0_{turn}", "variant": f"v{index}", "part": "",
                    "begun": lane[0] + bool(lane[2]),
                    **dict(zip(names, lane, strict=True)),
                }
                for index, lane in enumerate(lanes)
            )),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("looks", "left"),
    [
        ([(7, 0, 0.0)], 0),  # nothing is in flight
        ([(7, 0, 3.0), (7, 0, 9.0), (8, 0, 0.0)], 0),
        ([(7, 2, 3.0), (8, 9, 9.0), (9, 9, 9.0), (10, 9, 1.0), (11, 9, 9.0)], 1),  # others come
        # A call goes on to the second lane, and others come.
        (
            [
                ((7, 0, 3.0), (4, 0, 0.0)),
                ((8, 9, 1.0), (4, 0, 1.0)),
                ((8, 9, 2.0), (4, 0, 2.0)),
                ((18, 9, 2.0), (4, 9, 3.0)),
                ((18, 9, 3.0), (5, 9, 1.0)),
                ((18, 9, 4.0), (5, 9, 2.0)),
            ],
            1,
        ),
    ],
)
def test_what_was_in_flight_at_the_end_is_finished(monkeypatch, looks, left):
    clock = SimpleNamespace(now=0.0)
    place = SimpleNamespace(
        monotonic=lambda: clock.now, sleep=lambda s: setattr(clock, "now", clock.now + s)
    )
    monkeypatch.setattr(supervisor_module, "time", place)
    supervisor = Supervisor(None, ServeOptions(), Board("m", ("v",)), None)
    prober = Lanes(*looks)
    process = SimpleNamespace(stubs_of=lambda _: [])
    supervisor._finish_lanes(process, prober, end=1000.0)
    assert len(prober.looks) == left


def test_what_is_in_flight_in_each_process_of_the_router_is_finished(monkeypatch):
    place = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(supervisor_module, "time", place)
    supervisor = Supervisor(None, ServeOptions(), Board("m", ("v",)), None)
    idle, busy = (7, 0, 0.0), (3, 0, 2.0)
    prober = Lanes(idle, busy, idle, busy, idle, (4, 0, 0.0), idle, routers=2)
    supervisor._finish_lanes(SimpleNamespace(stubs_of=lambda _: [0, 0]), prober, end=1000.0)
    assert len(prober.looks) == 1


@pytest.mark.parametrize(
    ("callers", "late", "asked"),
    [
        ((0,), 0, []),  # nobody waits for an answer
        ((1, 2), 0, ["m", "v"]),  # the second connection is the prober's
        ((1, 1), 0, ["m"]),  # the caller has left meanwhile
        ((1, 2), 100, ["m", "v"]),  # a router that is late is busy
    ],
)
def test_calls_past_the_router_are_finished_too(monkeypatch, callers, late, asked):
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    supervisor = Supervisor(None, ServeOptions(), Board("m", ("v",)), None)
    prober = Lanes((7, 0, 0.0), (7, 0, 0.0), late=late)
    counts = iter(callers)
    process = SimpleNamespace(callers=lambda: next(counts), stubs_of=lambda _: [])
    supervisor._finish_calls(process, prober)
    assert prober.asked == asked and not list(counts)


def test_the_end_is_not_waited_for_without_limit(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    place = SimpleNamespace(
        monotonic=lambda: clock.now, sleep=lambda _: setattr(clock, "now", clock.now + 1)
    )
    monkeypatch.setattr(supervisor_module, "time", place)
    supervisor = Supervisor(None, ServeOptions(grace_s=5), Board("m", ("v",)), None)
    process = SimpleNamespace(callers=lambda: 1, stubs_of=lambda _: [])
    supervisor._finish_calls(process, Lanes(*[(7, 0, 3.0)] * 100))
    assert clock.now == 5
    supervisor._left_s = 10.0
    supervisor._finish_calls(process, Lanes(*[(7, 0, 3.0)] * 100))
    assert clock.now == 5 + 30
    supervisor._hurry = True
    supervisor._finish_calls(process, Lanes())
