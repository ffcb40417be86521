# SPDX-License-Identifier: Apache-2.0
"""A routed request that waits for its answer."""

import time
from typing import Any, NamedTuple

from choose import RequestRefused

# The server passes `timeout` on as an unsigned number: -1 arrives as 2^64 - 1. A week is forever.
NEGATIVE_US = 2**63
LONGEST_US = 7 * 24 * 3600 * 10**6


class Ticket(NamedTuple):
    """A request, its cost, and the time until which its caller waits."""

    role: str  # role of the component that it is for
    inputs: dict[str, Any]  # arrays by name; encoded images as an array of bytes
    rows: int
    parameters: dict[str, Any]  # the family's own parameters, checked
    wanted: tuple[str, ...]
    sender: Any
    deadline_s: float | None  # in time.monotonic(); None if the caller set no timeout
    arrived_s: float
    caller: str = ""  # callers share a lane equally; all without a name count as one
    work: float = 1.0  # rows; for a search: rows times hypotheses times steps
    megapixels: float = 0.0  # to decode, according to the files' headers
    size: int = 0  # bytes of the inputs
    policy: str = ""  # the policy that the request follows, if it is a chain of one variant
    adapted: Any = None  # what the answer says about the load-adaptive choice, if there was one

    @property
    def is_late(self) -> bool:
        """True if the caller's time has run out."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def left_s(self) -> float:
        """Time for which the caller still waits; infinite without a timeout."""
        return float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def waited_s(self) -> float:
        """Time since the request arrived in the router."""
        return time.monotonic() - self.arrived_s


def deadline(timeout_us: int, now_s: float) -> float | None:
    """Return the deadline of a request; None without a timeout.

    Raises: RequestRefused for a negative timeout.
    """
    if timeout_us >= NEGATIVE_US or timeout_us < 0:
        signed = timeout_us - 2**64 if timeout_us > 0 else timeout_us
        raise RequestRefused(
            f"the request's timeout is {signed} microseconds, expected 1 or more, or 0 for none"
        )
    return now_s + time_for(timeout_us) if timeout_us else None


def time_for(timeout_us: int) -> float:
    """Return the seconds that a caller waits; infinite without a timeout."""
    return min(timeout_us, LONGEST_US) / 1e6 if timeout_us else float("inf")


def caller_of(request_id: str) -> str:
    """Return the caller's name: the part of a request's id before its first slash."""
    name, slash, _ = request_id.partition("/")
    return name[:64] if slash else ""
