# SPDX-License-Identifier: Apache-2.0
"""Two calls timed turn by turn: on a shared machine only their ratio means something."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[int], Any]  # given the index of the inputs to take


@dataclass(frozen=True)
class Ratio:
    """Time of the peer over time of ours, in each round."""

    ours_us: float
    peer_us: float
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def to_dict(self) -> dict[str, Any]:
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return {
            "ours_us": self.ours_us,
            "peer_us": self.peer_us,
            "peer_over_ours": self.median,
            "quartiles": [low, high],
            "rounds": len(self.rounds),
        }


def interleaved(ours: Call, peer: Call, *, rounds: int, moment_s: float) -> Ratio:
    """Each round times both for about `moment_s`, the order turned from round to round.

    The calls get 0, 1, 2, ... so that inputs can be rotated.
    """
    counts = [_calls_in(call, moment_s) for call in (ours, peer)]
    times: list[list[float]] = [[], []]
    for index in range(rounds):
        for which in ((0, 1), (1, 0))[index % 2]:
            times[which].append(_seconds_a_call((ours, peer)[which], counts[which]))
    ratios = tuple(theirs / mine for mine, theirs in zip(*times, strict=True))
    mine, theirs = (1e6 * statistics.median(each) for each in times)
    return Ratio(mine, theirs, ratios)


def _calls_in(call: Call, moment_s: float) -> int:
    call(0)
    start = time.perf_counter()
    call(1)
    once = max(time.perf_counter() - start, 1e-7)
    return max(1, min(100_000, round(moment_s / once)))


def _seconds_a_call(call: Call, count: int) -> float:
    start = time.perf_counter()
    for index in range(count):
        call(index)
    return (time.perf_counter() - start) / count
