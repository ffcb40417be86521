# SPDX-License-Identifier: Apache-2.0
"""Outcomes of requests: answered, refused for a reason, or failed. Standard library only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlog import Ticket

ANSWERED = "answered"
FAILED = "failed"  # a fault of the router or the model
# Refusals: requests that the caller can correct or can retry later, and callers that have gone.
INVALID_REQUEST, INVALID_IMAGE = "invalid_request", "invalid_image"
BUSY, QUEUE_FULL, TIMEOUT, UNAVAILABLE = "busy", "queue_full", "timeout", "unavailable"
CALLER_GONE = "caller_gone"

# Names of the protocol's codes in the server's module.
CODES = {
    FAILED: "INTERNAL",
    INVALID_REQUEST: "INVALID_ARG",
    INVALID_IMAGE: "INVALID_ARG",
    BUSY: "UNAVAILABLE",
    QUEUE_FULL: "UNAVAILABLE",
    TIMEOUT: "UNAVAILABLE",
    UNAVAILABLE: "UNAVAILABLE",
    CALLER_GONE: "CANCELLED",
}
REFUSALS = tuple(reason for reason in CODES if reason != FAILED)
ASK_EVERY_S = 0.05


class Refused(Exception):
    """Raised to refuse a request, with a message for the caller and one of `REFUSALS`."""

    def __init__(self, message: str, reason: str, *, of_inputs: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.of_inputs = of_inputs  # whether the inputs may be the cause


class CallerCheck:
    """Checks between the steps of a long request that its caller still waits."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._asked_s = ticket.arrived_s

    def check(self, where: str) -> None:
        """Return if the caller still waits.

        Raises: Refused if its time has run out, or it has gone.
        """
        ticket = self._ticket
        if ticket.is_late:
            raise Refused(f"the request's timeout ran out {where}", TIMEOUT)
        # This queries the server, so do it neither immediately nor at every step.
        if time.monotonic() - self._asked_s > ASK_EVERY_S:
            self._asked_s = time.monotonic()
            if ticket.sender.is_cancelled():
                raise Refused("the caller has gone", CALLER_GONE)
