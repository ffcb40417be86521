# SPDX-License-Identifier: Apache-2.0
"""Forecast when the router would answer a request.

The lanes measure themselves. The server does not tell how long requests wait in it before the
router receives them, so the router sends itself a probe through the queue of the server, while
there are requests that adapt to the load.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backlog import Ticket
    from choose import Candidate
    from lane import Lane
    from routes import Route, Routes


# A later step that is reached with less than this probability does not count.
RARE_SHARE = 0.05
# Weight of the calibration's shares of rows that reach a step, in rows of traffic.
CALIBRATION_ROWS = 50.0
# Rows of traffic that count for these shares.
TRAFFIC_ROWS = 2000.0
# Share of rows that go on to the next step, if nothing is known.
GUESSED_SHARE = 0.5

EVERY_S = 0.05  # a probe costs about 2 ms of CPU time, in the server and in the router
CALM_LAG_S, CALM_EVERY_S = 0.005, 0.1  # while probes do not wait longer than this
PROBE_RETRY_S = 1.0  # after a probe that failed
ACTIVE_S = 1.0  # after the last request, no probe is sent


class Reach:
    """Share of a policy's rows that reach each of its steps, from its traffic."""

    def __init__(self, steps: int, ended: Sequence[float] = ()) -> None:
        """`ended` are the shares of the calibration's samples that end at each step."""
        at_first = [GUESSED_SHARE**at for at in range(steps)]
        if len(ended) == steps:
            at_first = [max(0.0, 1.0 - sum(ended[:at])) for at in range(steps)]
        self._reached = [CALIBRATION_ROWS * share for share in at_first]
        self.shares = at_first  # of the rows that reach each step; 1 for the first

    def add(self, ended: Sequence[int]) -> None:
        """Record how many rows of a request ended at each step."""
        keep = 1.0 - sum(ended) / TRAFFIC_ROWS
        for at in range(len(self._reached)):
            self._reached[at] = max(0.0, keep) * self._reached[at] + sum(ended[at:])
        self.shares = [reached / self._reached[0] for reached in self._reached]


class Forecast:
    """What the lanes of one router are about to do.

    `lanes` are by variant and role. An unmeasured lane is judged by the measured ones and by the
    relative speed of its variant; until one lane has been measured, everything takes no time.
    """

    def __init__(
        self, routes: Routes, lanes: Mapping[tuple[str, str], Lane], reach: dict[str, Reach]
    ) -> None:
        self._quickness = {route.name: route.quickness for route in routes.variants}
        self._lanes, self._reach = lanes, reach

    def learn(self, policy: str, ended: Sequence[int]) -> None:
        """Record at which steps of a policy the rows of a request ended."""
        if policy in self._reach:
            self._reach[policy].add(ended)

    def answer_s(self, candidate: Candidate, ticket: Ticket) -> float:
        """Return the seconds after which a request would be answered."""
        return self._sum(candidate, ticket, self._waiting_s)

    def alone_s(self, candidate: Candidate, ticket: Ticket) -> float:
        """Return the seconds that a request would take if nothing else was waiting."""
        return self._sum(candidate, ticket, lambda *_: 0.0)

    def seems_slow(self, candidate: Candidate, role: str) -> bool:
        """Return whether a forecast that the candidate is too slow should be tried now.

        A candidate that gets no requests would otherwise seem too slow forever. Its lanes are idle,
        so only one request at a time finds out.
        """
        lanes = [self._lane(route, role) for route in candidate.routes]
        return all(lane.idle for lane in lanes) and any(lane.service.unsure for lane in lanes)

    def _sum(
        self, candidate: Candidate, ticket: Ticket, wait: Callable[[Route, Ticket], float]
    ) -> float:
        total = 0.0
        for at, (route, share) in enumerate(
            zip(candidate.routes, self._shares(candidate), strict=True)
        ):
            if 1.0 - (1.0 - min(1.0, share)) ** ticket.rows < RARE_SHARE:
                break
            lane = self._lane(route, ticket.role)
            own = self._seconds(route, ticket.role, max(1.0, share * ticket.work))
            decode = 0.0 if at else lane.pace.decode.of(ticket.megapixels)
            total += wait(route, ticket) + own + decode
        return total

    def _waiting_s(self, route: Route, ticket: Ticket) -> float:
        """Return the seconds until the lane of a variant starts on a request that arrives now."""
        lane = self._lane(route, ticket.role)
        waiting = lane.ahead_of(ticket)
        group = _group(route, ticket.work)
        groups, rest = divmod(waiting.work, group)
        seconds = groups * self._seconds(route, ticket.role, group)
        seconds += self._seconds(route, ticket.role, rest) if rest else 0.0
        decode_s = lane.pace.decode.of(waiting.megapixels)
        return waiting.left_s + seconds / lane.in_flight + decode_s / lane.decoders

    def _seconds(self, route: Route, role: str, rows: float) -> float:
        """Return the time of a group; of an unmeasured lane, from those that were measured."""
        if own := self._lane(route, role).service.seconds(rows):
            return own
        scales = sorted(
            seconds * quickness
            for name, quickness in self._quickness.items()
            if (seconds := self._lanes[name, role].service.seconds(rows))
        )
        return scales[len(scales) // 2] / route.quickness if scales else 0.0

    def _shares(self, candidate: Candidate) -> list[float]:
        if candidate.policy is None or candidate.policy.name not in self._reach:
            return [1.0] * len(candidate.routes)
        return self._reach[candidate.policy.name].shares

    def _lane(self, route: Route, role: str) -> Lane:
        return self._lanes[route.name, role]


def _group(route: Route, work: float) -> float:
    """Return the work of a lane's full group if requests are of this work; it has at least one."""
    return max(float(route.run_batch), work)


class ServerQueue:
    """Measures the server's queue of one router with probes from a thread."""

    def __init__(self, model: str, routes: Routes, parameters: dict[str, str], output: str) -> None:
        """`parameters` and `output` are those of a probe."""
        self._model, self._parameters, self._output = model, parameters, output
        self._inputs = _inputs(routes)
        self._used_s = 0.0
        self._last_s = (0.0, 0.0)  # the last two probes: a queue lasts, a pause of the machine not
        self._asked_s: float | None = None
        self._warned = False
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def lag_s(self) -> float:
        """Seconds that a request waited before the router received it; 0 while it is unknown."""
        self._used_s = now_s = time.monotonic()
        asked_s = self._asked_s
        return max(min(self._last_s), 0.0 if asked_s is None else now_s - asked_s)

    @property
    def _pause_s(self) -> float:
        return EVERY_S if max(self._last_s) > CALM_LAG_S else CALM_EVERY_S

    def close(self) -> None:
        """Stop sending probes."""
        self._ended.set()

    def _serve(self) -> None:
        while not self._ended.wait(self._pause_s):
            if time.monotonic() - self._used_s > ACTIVE_S:
                self._last_s = (0.0, 0.0)
                continue
            try:
                self._probe()
            except Exception as error:  # such as while the server starts or stops
                self._asked_s, self._last_s = None, (0.0, 0.0)
                if self._ended.wait(PROBE_RETRY_S) or self._warned:
                    continue
                self._warned = True
                pb.Logger.log_warn(f"the server's queue cannot be measured: {error!r}")

    def _probe(self) -> None:
        self._asked_s = asked_s = time.monotonic()
        tensors = [pb.Tensor(name, array) for name, array in self._inputs.items()]
        response = pb.InferenceRequest(
            model_name=self._model,
            inputs=tensors,
            requested_output_names=[self._output],
            parameters=self._parameters,
        ).exec()
        if response.has_error():
            raise RuntimeError(response.error().message())
        self._last_s = self._last_s[1], time.monotonic() - asked_s
        self._asked_s = None


def _inputs(routes: Routes) -> dict[str, np.ndarray]:
    """Return the smallest inputs that the server accepts for the first component."""
    component = next(iter(routes.components.values()))
    made = {}
    for spec in component.inputs:
        if spec.name in component.optional:
            continue
        if spec.name in component.encoded:
            made[spec.name] = np.array([[b""]], dtype=object)
            continue
        shape = [int(axis) if axis.isdigit() else 1 for axis in spec.axes.split()]
        made[spec.name] = np.zeros(shape if len(shape) > 1 else [1, 1], spec.dtype)
    return made
