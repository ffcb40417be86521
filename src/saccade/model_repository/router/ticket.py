# SPDX-License-Identifier: Apache-2.0
"""A request that has been routed and waits for its answer."""

import time
from typing import Any, NamedTuple

from choose import RequestRefused

# The server hands `timeout` on as an unsigned number: -1 comes as 2^64 - 1. A week is for ever.
NEGATIVE_US = 2**63
LONGEST_US = 7 * 24 * 3600 * 10**6


class Ticket(NamedTuple):
    """A request, what it costs, and until when its caller waits."""

    role: str  # of the component it is for
    inputs: dict[str, Any]  # arrays by name; encoded images as an array of bytes
    rows: int
    parameters: dict[str, Any]  # the family's own, checked
    wanted: tuple[str, ...]
    sender: Any
    deadline_s: float | None  # on time.monotonic(), where the caller set a timeout
    arrived_s: float
    caller: str = ""  # who shares the lane with others; all without a name are one
    work: float = 1.0  # rows, or of a search rows by hypotheses by steps
    megapixels: float = 0.0  # to decode, as the files' headers say
    size: int = 0  # bytes of the inputs
    policy: str = ""  # that the request follows, where that is a chain of one variant

    @property
    def is_late(self) -> bool:
        """True if the caller's time has run out."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def left_s(self) -> float:
        """Time that the caller still waits; without a timeout it is infinite."""
        return float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def waited_s(self) -> float:
        """Time that the request has been in the router."""
        return time.monotonic() - self.arrived_s


def deadline(timeout_us: int, now_s: float) -> float | None:
    """Deadline of a request; none without a timeout.

    Raises: RequestRefused for a negative timeout.
    """
    if timeout_us >= NEGATIVE_US or timeout_us < 0:
        signed = timeout_us - 2**64 if timeout_us > 0 else timeout_us
        raise RequestRefused(
            f"the request's timeout is {signed} microseconds, expected 1 or more, or 0 for none"
        )
    return now_s + min(timeout_us, LONGEST_US) / 1e6 if timeout_us else None


def caller_of(request_id: str) -> str:
    """The caller's name: what a request's id has in front of its first slash."""
    name, slash, _ = request_id.partition("/")
    return name[:64] if slash else ""
