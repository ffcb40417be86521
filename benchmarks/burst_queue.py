# SPDX-License-Identifier: Apache-2.0
"""The bursts of bursts.py in simulated time: the router's own choice, without a server or a clock.

    python benchmarks/burst_queue.py                 # 5 rounds of 60 s each, about 5 minutes
    python benchmarks/burst_queue.py --own-devices   # each variant has a device instead of all one

The router's lanes, forecasts and choice run as they are, with a clock that jumps from event to
event, so the machine that simulates does not matter. Calls take the stated times of bursts.py, with
5 % noise. What a server, callers and Python cost is left out. Besides fixed budgets, an ideal
choice takes part: it knows the times instead of measuring them. Writes results/burst_queue.json.
"""

import argparse
import heapq
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from bursts import AIM_IN_TIME, ARRIVALS, BATCH, CAPACITY, FIXED_IN, SLO_MS, VARIANTS, mean_of
from result_file import options_of, write_result

from saccade.serving.bench.replay.arrivals import Generated
from saccade.serving.bench.replay.figures import recovery_s

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from router_code import router_module
from support.serving.routers import variant_route

sys.modules["triton_python_backend_utils"] = ModuleType("pb")  # the server's, which is not here
NAMES = ("adaptive", "backlog", "choose", "forecast", "lane", "pace", "routes")
adaptive, backlog, choose, forecast, lane, pace, routes = map(router_module, NAMES)

SLO_S, NOISE = SLO_MS / 1e3, 0.05
WARM_S = 2.0
BUDGETS, SCORES = tuple(VARIANTS), np.array([score for *_, score in VARIANTS.values()])
NOBODY = -1


class Clock:
    """The time of the simulation, in place of the router's."""

    def __init__(self) -> None:
        self.now_s, self.thread = 0.0, 0
        for module in (adaptive, backlog, forecast, lane, pace):
            module.time = SimpleNamespace(monotonic=lambda: self.now_s)  # type: ignore[attr-defined]
        lane.threading = SimpleNamespace(get_ident=lambda: self.thread)  # type: ignore[attr-defined]
        for module in (adaptive, lane):
            module.refuse = lambda *_: None  # type: ignore[attr-defined]


class StillLane(lane.Lane):  # type: ignore[name-defined]
    """A lane without threads: the simulation takes its groups."""

    def __init__(self, name: str) -> None:
        self.name, self.pace, self.service = name, pace.Pace(), pace.ServiceTime()
        self.in_flight = self.decoders = 1
        self._wake, self._decodes, self._group_rows = lambda: None, False, BATCH
        self._backlog, self._flights, self._begun = backlog.Backlog(), {}, 0
        self._upcoming, self._ahead, self._closed = None, set(), False
        self._changed = threading.Condition(threading.RLock())

    def group(self) -> list[Any]:
        """Take the next group, if none is running."""
        self._backlog.expired()
        if self._flights:
            return []
        group = self._backlog.take(BATCH, self.pace.seconds, self._is_ready)
        if group:
            self._begin(group)
        return group


def call_s(at: int, rows: int) -> float:
    """Return the stated time of a call of a variant."""
    fixed, each, _ = VARIANTS[BUDGETS[at]]
    return fixed + each * rows


def routes_of() -> routes.Routes:
    """Return the routes of the variants, with their speed in full batches."""
    made = [
        routes.Route(
            **variant_route(
                f"b{budget:g}", budget=budget, setting=f"b{budget:g}", run_batch=BATCH,
                inferences_per_second=BATCH / call_s(at, BATCH),
            )
        )
        for at, budget in enumerate(BUDGETS)
    ]  # fmt: skip
    rules = routes.AdaptiveRules(SLO_MS, None, {})
    return routes.Routes("m", "nac", None, {}, tuple(made), adaptive=rules)


class Queue:
    """One run: requests that arrive at stated times, and a way to answer them."""

    def __init__(self, clock: Clock, at_s: np.ndarray, seed: int, *, own_devices: bool) -> None:
        self.clock, self.at_s, self.own_devices = clock, at_s, own_devices
        self.rng, self.routes = np.random.default_rng(seed), routes_of()
        self.who, self.ms = np.full(len(at_s), NOBODY), np.zeros(len(at_s))
        self.lanes = {(route.name, ""): StillLane(route.name) for route in self.routes.variants}
        self.adaptive = adaptive.Adaptive(self.routes, self.lanes, self.release)
        self.events: list[tuple[float, int, Callable[..., None], Any]] = []
        self.device: deque[tuple[int, list[int]]] = deque()
        self.busy, self.waiting, self.count = False, deque[int](), 0

    def run(self, arrive: Callable[[int], None]) -> "Queue":
        """Let all requests arrive, until the last one has ended."""
        for number, at_s in enumerate(self.at_s.tolist()):
            self.later(at_s, arrive, number)
        while self.events:
            self.clock.now_s, _, what, number = heapq.heappop(self.events)
            what(number)
        return self

    def later(self, at_s: float, what: Callable[..., None], given: Any) -> None:
        """Let something happen."""
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, what, given))

    def ticket(self, number: int) -> Any:
        """Return a request for the router."""
        now_s = self.clock.now_s
        return backlog.Ticket(
            "", {}, 1, {}, (), SimpleNamespace(number=number, waited=lambda _: None),
            now_s + SLO_S, now_s,
        )  # fmt: skip

    def by_router(self, number: int) -> None:
        """A request that names nothing."""
        try:
            self.adaptive.offer(choose.Wish(SLO_S, None, None), self.ticket(number))
        except adaptive.Busy:
            return
        self.start()

    def by_budget(self, at: int) -> Callable[[int], None]:
        """Requests that name a budget."""

        def arrive(number: int) -> None:
            self.lanes[self.routes.variants[at].name, ""].offer(self.ticket(number))
            self.start()

        return arrive

    def release(self, candidate: Any, wish: Any, ticket: Any) -> None:
        self.lanes[candidate.routes[0].name, ""].offer(ticket)

    def start(self) -> None:
        """Let the lanes take groups, and the device the next call."""
        self.adaptive.expire()
        for at, one in enumerate(self.lanes.values()):
            self.clock.thread = at
            if group := one.group():
                numbers = [ticket.sender.number for ticket in group]
                if self.own_devices:
                    self.call(at, numbers, self.end)
                else:
                    self.device.append((at, numbers))
        if self.device and not self.busy:
            self.busy = True
            self.call(*self.device.popleft(), self.end)

    def call(self, at: int, numbers: list[int], end: Callable[[Any], None]) -> None:
        """Run a variant for some requests."""
        seconds = call_s(at, len(numbers)) * math.exp(NOISE * self.rng.standard_normal())
        self.later(self.clock.now_s + seconds, end, (at, numbers))

    def answer(self, at: int, numbers: Sequence[int]) -> None:
        self.who[[*numbers]] = at
        self.ms[[*numbers]] = 1e3 * (self.clock.now_s - self.at_s[[*numbers]])

    def end(self, of: tuple[int, list[int]]) -> None:
        """A lane's group has ended."""
        at, numbers = of
        self.busy, self.clock.thread = False, at
        self.answer(at, numbers)
        [*self.lanes.values()][at]._note(float(len(numbers)))
        self.adaptive.go_on()
        self.start()

    def by_ideal(self, number: int) -> None:
        """The best variant with which all that wait are in time, by the stated times."""
        self.waiting.append(number)
        self.next_ideal()

    def next_ideal(self) -> None:
        while self.waiting and self.left_s(self.waiting[0]) < call_s(len(BUDGETS) - 1, 1):
            self.waiting.popleft()
        if self.busy or not self.waiting:
            return
        fitting = (at for at in range(len(BUDGETS)) if self.all_in_time(at))
        at, self.busy = next(fitting, len(BUDGETS) - 1), True
        numbers = [self.waiting.popleft() for _ in range(min(BATCH, len(self.waiting)))]
        self.call(at, numbers, self.end_ideal)

    def end_ideal(self, of: tuple[int, list[int]]) -> None:
        self.busy = False
        self.answer(*of)
        self.next_ideal()

    def left_s(self, number: int) -> float:
        return float(self.at_s[number]) + SLO_S - self.clock.now_s

    def all_in_time(self, at: int) -> bool:
        waiting, ended_s = [*self.waiting], 0.0
        for first in range(0, len(waiting), BATCH):
            ended_s += call_s(at, len(waiting[first : first + BATCH]))
            if ended_s > adaptive.SURE * self.left_s(waiting[first]):
                return False
        return True


def figures(queue: Queue, edges: np.ndarray) -> dict[str, Any]:
    """Return the share in time, and the mean score of what was in time and over all requests."""
    counted = queue.at_s > WARM_S
    in_time = (queue.who != NOBODY) & (queue.ms <= SLO_MS)
    score = np.where(in_time, SCORES[queue.who], 0.0)
    found = {
        "in_time": float(in_time[counted].mean()),
        "score": float(score[counted & in_time].mean()),
        "by_score": float(score[counted].mean()),
        "behind": False,
    }
    if len(edges) > 2:
        best = in_time & (queue.who == 0)
        after = (queue.at_s, in_time, edges[-2], 0.99), (queue.at_s, best, edges[-2], 0.5)
        found["recovery_s"], found["full_again_s"] = (recovery_s(*each) for each in after)
    return found


def main() -> None:
    parser: argparse.ArgumentParser = options_of(__doc__, "burst_queue", rounds=5, seconds=60.0)
    parser.add_argument("--own-devices", action="store_true", help="a device for each variant")
    options = parser.parse_args()
    clock, results, summary = Clock(), dict[str, Any](), dict[str, Any]()
    for form in ARRIVALS:
        kind, _, numbers = form.partition(":")
        rate, *more = numbers.split(",")
        made = Generated.read(f"{kind}:{','.join([rate, *more])}")
        arms: dict[str, list[dict[str, Any]]] = {}
        for seed in range(options.rounds):
            arrivals = made.arrivals(made.rate * CAPACITY, options.seconds, seed)
            budgets = range(len(BUDGETS)) if form in FIXED_IN else (0, len(BUDGETS) - 1)
            names = ["adaptive", "ideal", *(f"budget {BUDGETS[at]:g}" for at in budgets)]
            for name, at in zip(names, (0, 0, *budgets), strict=True):
                clock.now_s = 0.0
                queue = Queue(clock, arrivals.at_s, seed, own_devices=options.own_devices)
                ways = {"adaptive": queue.by_router, "ideal": queue.by_ideal}
                queue.run(ways.get(name) or queue.by_budget(at))
                arms.setdefault(name, []).append(figures(queue, arrivals.edges))
        results[form] = arms
        keys = ("in_time", "score", "by_score")
        summary[form] = {
            arm: {key: mean_of(runs, key) for key in keys} for arm, runs in arms.items()
        }
        for arm, means in summary[form].items():
            shares = ", ".join(f"{key} {100 * one['mean']:.2f}" for key, one in means.items())
            again = [run.get("full_again_s") for run in arms[arm]]
            print(f"{form} {arm}: {shares}; full model again after {again}", flush=True)
    content = {
        "benchmark": "bursts in simulated time",
        "slo_ms": SLO_MS,
        "batch": BATCH,
        "variants": {f"{budget:g}": list(each) for budget, each in VARIANTS.items()},
        "capacity_per_s": CAPACITY,
        "own_devices": options.own_devices,
        "seconds": options.seconds,
        "aim_in_time": AIM_IN_TIME,
        "summary": summary,
        "runs": results,
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
