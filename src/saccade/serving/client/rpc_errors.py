# SPDX-License-Identifier: Apache-2.0
"""Meaning of a failed call, in words that name the server, the variant and what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saccade.errors import SaccadeError, ServerFailed

_UNREACHABLE = re.compile(
    r"failed to connect|connection refused|socket closed|connection reset|broken pipe|recvmsg"
    r"|connection attempt|dns resolution|name resolution|goaway|http2|end of tcp stream",
    re.IGNORECASE,
)
# The server names the instance of a dead model, the router the variant that did not answer it.
_DEAD = re.compile(
    r"'([a-z0-9-]+)_\d+_\d+' is not healthy|variant '([a-z0-9-]+)' (?:failed|has died)"
)
# The server's own words, then the router's: full, late, and what it says of a request's timeout.
_BUSY = re.compile(
    r"maximum queue size|queue of variant '[a-z0-9-]+' is full|variant '[a-z0-9-]+' is busy"
    r"|request's timeout ran out",
    re.IGNORECASE,
)


def is_unreachable(error: Any) -> bool:
    """True if nobody took the connection, so that nothing is known of the model."""
    refused = str(error.status()).endswith("UNAVAILABLE")
    return refused and _UNREACHABLE.search(str(error.message())) is not None


def is_queue_full(error: Any) -> bool:
    """True if the server refused a request only because many others wait."""
    return _BUSY.search(str(error.message())) is not None


@contextmanager
def explained(url: str, model: str, timeout_s: float) -> Iterator[None]:
    """A call to `model` at `url`, whose failure is raised in words."""
    from tritonclient.utils import InferenceServerException

    try:
        yield
    except InferenceServerException as error:
        raise explain(error, url, model, timeout_s) from error


def explain(error: Any, url: str, model: str, timeout_s: float) -> SaccadeError:
    """The error to raise for an InferenceServerException of a call to `model` at `url`."""
    status = str(error.status() or "").removeprefix("StatusCode.")
    said = " ".join(str(error.message()).split())
    if status == "UNAVAILABLE" and _UNREACHABLE.search(said):
        return ServerFailed(
            f"{url}: no server answers there ({short(error)}). "
            "Start one with `saccade serve REPOSITORY`, or give its address with --url."
        )
    if status == "DEADLINE_EXCEEDED":
        return ServerFailed(
            f"{url}: no answer from {model} within {timeout_s:g} s. It hangs, is overloaded "
            f"or needs longer: see `saccade doctor --url {url}`, or allow more time."
        )
    if dead := _DEAD.search(said):
        return ServerFailed(
            f"{url}: variant {dead[1] or dead[2]} failed, and has perhaps died. If so, "
            "`saccade serve` loads it again: try again in some seconds, or see its log. "
            "The other variants answer."
        )
    if "ready state" in said or "no available versions" in said or "Server is stopping" in said:
        return ServerFailed(f"{url}: the server is stopping or being restarted. Try again later.")
    if "unknown model" in said or status == "NOT_FOUND":
        return SaccadeError(
            f"{url}: there is no model '{model}' ({said}). Name the model that the repository was "
            "made for; `saccade serve` shows it at its start."
        )
    if status in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
        return SaccadeError(f"{url}: {model} refuses the request: {said}")
    if status == "UNAVAILABLE":
        if is_queue_full(error):
            return ServerFailed(f"{url}: {model} is overloaded: {said}.")
        return ServerFailed(f"{url}: {model} takes no request now: {said} Try again later.")
    return ServerFailed(f"{url}: {model} failed ({status or 'no status'}): {said}")


def short(error: Any) -> str:
    """The cause in few words."""
    said = " ".join(str(error.message()).split())
    if not _UNREACHABLE.search(said):
        return said.rstrip(".")
    # gRPC wraps the cause in several layers; the innermost is the last.
    return _UNREACHABLE.findall(said)[-1].lower()
