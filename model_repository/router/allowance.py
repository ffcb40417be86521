# SPDX-License-Identifier: Apache-2.0
"""The allowance of each caller: what it may put on later steps before it waits behind others.

A caller that sends hard images only would take away what policies save (Hong et al. 2021, arXiv
2010.02432). Its answers stay the same; its requests wait, and only in the lanes of later steps.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate

from routes import PolicyRoute, Route

TIMES = 2.0  # of the usual load
PRIOR_ROWS, FADE_ROWS = 64.0, 512.0  # rows as which the usual load counts; that are remembered
MOST_CALLERS = 256
RARE = 0.01  # share of rows that may always continue


class Allowance:
    """What callers put on later steps lately, in what the calibration's samples would have put."""

    def __init__(self) -> None:
        self._callers: dict[str, tuple[float, float]] = {}  # by name: load, and rows
        self._lock = threading.Lock()

    def starts(self, caller: str, rows: int) -> None:
        """Note rows that start at the first step."""
        keep = max(0.0, 1 - rows / FADE_ROWS)
        with self._lock:
            load, before = self._callers.pop(caller, (PRIOR_ROWS, PRIOR_ROWS))
            self._callers[caller] = keep * load, keep * before + rows
            if len(self._callers) > MOST_CALLERS:
                del self._callers[next(iter(self._callers))]  # not seen for longest

    def is_exceeded(self, caller: str, load: float) -> bool:
        """Note load of rows that continue; return whether it is too much of the usual one.

        The usual load is that of the calibration, or if the traffic is harder, of the callers in
        the middle: no caller waits for what is harder for all.
        """
        with self._lock:
            before, rows = self._callers.get(caller, (PRIOR_ROWS, PRIOR_ROWS))
            self._callers[caller] = before + load, rows
            every = sorted(load / rows for load, rows in self._callers.values())
            usual = max(1.0, every[(len(every) - 1) // 2])
            return before + load > TIMES * usual * rows


def loads_of(policy: PolicyRoute, routes: Sequence[Route]) -> list[float]:
    """Return the load of a row that reaches each step, in the mean load of a calibration's sample.

    It is 0 where that is not known.
    """
    shares = [step.end_share for step in policy.steps]
    if None in shares:
        return [0.0] * len(routes)
    reached = [1.0 - ended for ended in accumulate(shares)]
    costs = [1 / route.quickness for route in routes]
    usual = sum(share * cost for share, cost in zip(reached, costs[1:], strict=False))
    return [cost / max(usual, RARE * costs[-1]) for cost in costs]
