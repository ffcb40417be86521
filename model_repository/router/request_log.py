# SPDX-License-Identifier: Apache-2.0
"""Log one line per refused or failed request; `saccade serve` reads these lines.

Standard library only. The number and size of lines are limited: a caller that is refused a thousand
times per second must not fill a disk.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Set by `saccade serve --log-format json`, or by users who run the server without `saccade serve`.
REQUEST_LOG = "SACCADE_REQUEST_LOG"
REQUEST_LINE = "saccade-request "  # prefix of the message of such a line; JSON follows
# Fields of the JSON. Times are in seconds: waiting in the lane, and decoding plus running.
FIELDS = {
    "model": str, "request_id": str, "variant": str, "code": str, "reason": str,
    "waited_s": float, "run_s": float, "left_out": int,
}  # fmt: skip
MOST_ID, MOST_REASON = 128, 500  # characters
LINES_A_SECOND, MOST_LINES = 20.0, 100.0


class RequestLog:
    """Writes a limited number of lines per second; the next line has the number left out."""

    def __init__(self, model: str, write: Callable[[str], None]) -> None:
        self._model, self._write = model, write
        self._lock = threading.Lock()
        self._lines, self._since_s, self._left_out = MOST_LINES, time.monotonic(), 0

    def add(
        self,
        *,
        request_id: str,
        variant: str,
        code: str,
        reason: str,
        waited_s: float,
        run_s: float,
    ) -> None:
        """Write the line of a request, or count it as left out.

        Units: waited_s and run_s are seconds.
        """
        with self._lock:
            now = time.monotonic()
            earned = LINES_A_SECOND * (now - self._since_s)
            self._lines, self._since_s = min(MOST_LINES, self._lines + earned), now
            if self._lines < 1:
                self._left_out += 1
                return
            self._lines -= 1
            left_out, self._left_out = self._left_out, 0
        content: dict[str, Any] = {
            "model": self._model,
            "request_id": printable(request_id, MOST_ID),
            "variant": variant,
            "code": code,
            "reason": _printable_lines(reason),
            "waited_s": round(waited_s, 6),
            "run_s": round(run_s, 6),
        }
        if left_out:
            content["left_out"] = left_out
        self._write(REQUEST_LINE + json.dumps(content))


def _printable_lines(reason: str) -> str:
    """Return a reason whose lines are kept; its reader shows the further ones as detail."""
    lines = reason[:MOST_REASON].split("\n")
    return "\n".join(printable(line, MOST_REASON) for line in lines)[:MOST_REASON]


def printable(text: str, most: int) -> str:
    """Return the beginning of a caller's text, with control characters escaped."""
    beginning = text[:most]
    if not beginning.isprintable():
        beginning = "".join(
            letter if letter.isprintable() else repr(letter)[1:-1] for letter in beginning
        )
    return beginning[:most]
