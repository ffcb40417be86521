# SPDX-License-Identifier: Apache-2.0
"""Time limit of a start: only time without progress counts, since large models load for minutes."""

import time
from collections.abc import Callable

SHARE = 0.1  # of one core: less is housekeeping, not progress
MOST_TIMES = 10.0  # a start may take this many times the limit, however much it computes
_LOOK_S = 1.0  # between two looks at the CPU time


class StartLimit:
    """Watches one start from now on; `used_s` returns the CPU time of its processes so far."""

    def __init__(
        self, used_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = used_s, clock
        self._began_s = self._looked_s = self._progress_s = clock()
        self._used_s = 0.0

    def is_over(self, limit_s: float) -> bool:
        """Return True if there was no progress for so long, or for much longer no end of it."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            used_s = self._read()
            # Less than before: a process that had used some has ended.
            if used_s < self._used_s or used_s - self._used_s > SHARE * (now_s - self._looked_s):
                self._progress_s = now_s
            self._used_s, self._looked_s = used_s, now_s
        return now_s - self._progress_s > limit_s or now_s - self._began_s > MOST_TIMES * limit_s

    def text(self, limit_s: float) -> str:
        """Return the limit that was passed, and what to do."""
        seconds = self._clock() - self._began_s
        return (
            f"after {seconds:.0f} s, {self._clock() - self._progress_s:.0f} of them without "
            f"progress, expected at most {limit_s:g}. Allow more with --start-timeout-s"
        )
