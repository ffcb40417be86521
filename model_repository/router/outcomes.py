# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a request: one word each for the metrics, and the protocol's code."""

from typing import Any

import triton_python_backend_utils as pb

ANSWERED = "answered"
FAILED = "failed"  # a fault of the router or the model
# Refusals: requests that the caller can correct or can retry later, and callers that have gone.
INVALID_REQUEST, INVALID_IMAGE = "invalid_request", "invalid_image"
BUSY, QUEUE_FULL, TIMEOUT, UNAVAILABLE = "busy", "queue_full", "timeout", "unavailable"
CALLER_GONE = "caller_gone"

_CODES = {
    FAILED: "INTERNAL",
    INVALID_REQUEST: "INVALID_ARG",
    INVALID_IMAGE: "INVALID_ARG",
    BUSY: "UNAVAILABLE",
    QUEUE_FULL: "UNAVAILABLE",
    TIMEOUT: "UNAVAILABLE",
    UNAVAILABLE: "UNAVAILABLE",
    CALLER_GONE: "CANCELLED",
}
REFUSALS = tuple(reason for reason in _CODES if reason != FAILED)


def code_of(reason: str) -> Any:
    """Return the protocol's code of a refusal or a failure."""
    return getattr(pb.TritonError, _CODES[reason])
