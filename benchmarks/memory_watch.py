# SPDX-License-Identifier: Apache-2.0
"""Watch a server's memory while something else runs, and compute its growth."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from saccade.core.machine import family_of, memory_mib
from saccade.serving.server.server import Server


@contextmanager
def memory_of(server: Server) -> Iterator[list[float]]:
    """Record the memory of the server and its stubs once per second until the block ends."""
    seen, ended = [], threading.Event()

    def look() -> None:
        while not ended.wait(1.0):
            if server.pid:
                seen.append(sum(memory_mib(family_of(server.pid)).values()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def grown(seen: list[float]) -> dict[str, Any]:
    """Return the growth from the second to the last quarter of the load; the first is warm-up."""
    quarter = max(1, len(seen) // 4)
    early, last = seen[quarter : 2 * quarter] or seen, seen[-quarter:]
    more = float(np.median(last) - np.median(early)) if seen else 0.0
    return {"grown": more, "most": max(seen, default=0.0), "each_second": seen}
