# SPDX-License-Identifier: Apache-2.0
"""Time two calls interleaved: on a shared machine, only their ratio is meaningful."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[int], Any]  # takes the index of the inputs to use


@dataclass(frozen=True)
class Ratio:
    """The peer's time divided by ours in each round, by the medians of the round's calls."""

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
        }


def in_turn(ours: Call, peer: Call, *, rounds: int, moment_s: float) -> Ratio:
    """Alternate single calls: each finds the caches as the other left them.

    A round takes about `moment_s`. Calls get 0, 1, 2, ... to rotate inputs.
    """
    return _interleaved(ours, peer, rounds=rounds, moment_s=moment_s, block=1)


def in_blocks(ours: Call, peer: Call, *, rounds: int, moment_s: float) -> Ratio:
    """Alternate blocks of calls: each finds its own data in the caches."""
    return _interleaved(ours, peer, rounds=rounds, moment_s=moment_s, block=None)


def _interleaved(
    ours: Call, peer: Call, *, rounds: int, moment_s: float, block: int | None
) -> Ratio:
    calls = (ours, peer)
    once = sum(min(_seconds(call, 0), _seconds(call, 1)) for call in calls)
    pairs = max(1, min(10_000, round(moment_s / once)))
    block = block or pairs
    medians: list[tuple[float, float]] = []
    for number in range(rounds):
        times: tuple[list[float], list[float]] = ([], [])
        for start in range(0, pairs, block):
            for which in ((0, 1), (1, 0))[(number + start) % 2]:
                for index in range(start, min(start + block, pairs)):
                    times[which].append(_seconds(calls[which], index))
        medians.append((statistics.median(times[0]), statistics.median(times[1])))
    mine, theirs = (1e6 * statistics.median(each) for each in zip(*medians, strict=True))
    return Ratio(mine, theirs, tuple(peer / own for own, peer in medians))


def _seconds(call: Call, index: int) -> float:
    start = time.perf_counter()
    call(index)
    return time.perf_counter() - start
