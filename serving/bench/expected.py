# SPDX-License-Identifier: Apache-2.0
"""How long a measurement will take, from the first batch of each variant, and its progress."""

import time
from collections.abc import Iterable

from saccade.core.progress import Advance
from saccade.serving.bench.in_process import BATCHES, LONGEST_CALL_S
from saccade.serving.bench.load import LEAST_ANSWERS, LONGER
from saccade.serving.bench.servers import WARMUP_S


def inside_s(rate: float, window_s: float) -> float:
    """Return how long one round of all batch sizes takes in process.

    Units:  rate in inferences per second; window_s per batch size.
    """
    total = call = 0.0
    for size in BATCHES:
        if call > LONGEST_CALL_S:
            break
        call = size / rate
        total += max(window_s, call) + call
    return total


def served_s(rate: float, clients: Iterable[int], window_s: float) -> float:
    """Return how long one round takes through a server, with each of these numbers of clients.

    Units:  rate in inferences per second.
    """
    total = 0.0
    for count in clients:
        first = max(LEAST_ANSWERS, count) / rate
        total += WARMUP_S + (window_s if first <= window_s else LONGER * first) + count / rate
    return total


def by_clock(advance: Advance) -> Advance:
    """Return an `Advance` whose steps are the seconds that passed since its last call."""
    last = time.monotonic()

    def passed(steps: float = 1, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        advance(now - last, note)
        last = now

    return passed
