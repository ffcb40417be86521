# SPDX-License-Identifier: Apache-2.0
"""How the requests of a replay ended, as shares with intervals.

Requests that arrive together wait together, so they are not independent draws, and an interval that
counts requests would be far too narrow. Time is cut into blocks that are longer than a queue lasts;
how the blocks vary gives the interval.
"""

import math
from typing import NamedTuple

import numpy as np

from saccade.models.scores.results import Interval, t975, wilson

PERCENTILES = (50, 95, 99)
BLOCK_S, BLOCK_DEADLINES, LEAST_BLOCKS, MOST_BLOCKS = 1.0, 10.0, 10, 30
WINDOW_S, STEP_S = 1.0, 0.05


class Blocks(NamedTuple):
    """Blocks of time.

    Shapes: of_request [n], indices. Units: shortest counts blocks of ten deadlines.
    """

    of_request: np.ndarray
    number: int
    shortest: int


def blocks_of(at_s: np.ndarray, deadline_ms: float) -> Blocks | None:
    """Return at most 30 blocks; None if the time is too short for an interval."""
    seconds = float(np.ptp(at_s)) if len(at_s) else 0.0
    shortest = int(LEAST_BLOCKS * seconds / shortest_s(deadline_ms))
    if shortest < LEAST_BLOCKS:
        return None
    count = min(MOST_BLOCKS, shortest)
    places = np.minimum(count - 1, (at_s - at_s[0]) / seconds * count).astype(int)
    return Blocks(places, count, shortest)


def shortest_s(deadline_ms: float) -> float:
    """Return from how many seconds on there is an interval."""
    return LEAST_BLOCKS * max(BLOCK_S, BLOCK_DEADLINES * deadline_ms / 1e3)


def share(hits: np.ndarray, blocks: Blocks | None) -> tuple[float, Interval | None]:
    """Return the share of requests, and Wilson's interval of as many independent requests.

    Their number is that which gives a share the variance that the blocks have. If all requests end
    alike, the queue was always short, and it is the number of shortest blocks.

    Source: Dean and Pagano 2015, section 2: Wilson's interval with the effective sample size.
    """
    found = float(hits.mean())
    if blocks is None:
        return found, None
    error = _error(hits.astype(float), blocks, found)
    independent = found * (1 - found) / error**2 if error else blocks.shortest
    independent = min(float(len(hits)), max(1.0, independent))
    return found, wilson(found * independent, independent, t975(blocks.number - 1))


def mean(
    values: np.ndarray, among: np.ndarray, blocks: Blocks | None
) -> tuple[float, Interval | None]:
    """Return the mean of some of the values, and its interval by Student's t over blocks."""
    found = float(values[among].mean())
    if blocks is None:
        return found, None
    half = t975(blocks.number - 1) * _error(np.where(among, values, found), blocks, found)
    half *= len(values) / among.sum()
    return found, (found - half, found + half)


def _error(values: np.ndarray, blocks: Blocks, centre: float) -> float:
    """Return the standard error of a mean over all values, of blocks that differ in size.

    Source: Cochran 1977, equation 2.46.
    """
    each = np.bincount(blocks.of_request, values - centre, blocks.number)
    return math.sqrt(blocks.number / (blocks.number - 1) * (each**2).sum()) / len(values)


def percentiles(values_ms: np.ndarray) -> dict[str, float]:
    """Return p50, p95 and p99; nothing of no values."""
    return {f"p{q}": float(np.percentile(values_ms, q)) for q in PERCENTILES if len(values_ms)}


def recovery_s(at_s: np.ndarray, good: np.ndarray, from_s: float, share: float) -> float | None:
    """Return after how long a share of the requests of the next second are good; None if never."""
    for begin_s in np.arange(from_s, at_s[-1] - WINDOW_S, STEP_S):
        inside = (at_s >= begin_s) & (at_s < begin_s + WINDOW_S)
        if not inside.any() or good[inside].mean() >= share:
            return float(begin_s - from_s)
    return None
