# SPDX-License-Identifier: Apache-2.0
"""The server's sender of one request's answer, which also counts the outcome of the request."""

from threading import get_ident
from typing import Any

from metrics import Metrics


class Reply:
    """The server's sender of one request, which keeps what is sent while `execute` runs.

    `execute` returns it then: the server takes it along with the end of `execute`. A response that
    is sent costs a message to the server and one back, for which `execute` would wait.
    """

    __slots__ = ("_kept", "_sender", "_thread")

    def __init__(self, sender: Any) -> None:
        """Call this in the thread that runs `execute`, and `executed` at its end."""
        self._sender, self._kept = sender, None
        self._thread: int | None = get_ident()

    def send(self, response: Any, flags: int) -> None:
        """Send a response, or keep it if it comes from `execute`."""
        if get_ident() == self._thread:
            self._kept = response
        else:
            self._sender.send(response, flags=flags)

    def executed(self) -> Any:
        """Return the response that was kept, or None; later ones are sent."""
        self._thread = None
        return self._kept

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return bool(self._sender.is_cancelled())


class Sender:
    """Sends like the server's own sender. `variant` is set when it has been chosen."""

    __slots__ = ("_metrics", "_own", "variant")

    def __init__(self, own: Any, metrics: Metrics) -> None:
        self._own, self._metrics, self.variant = own, metrics, ""

    @property
    def watched(self) -> Any:
        """The sender from `Instrumentation`."""
        return self._own

    def send(self, response: Any, flags: int) -> None:
        """Send an answer or an error; call `ended` afterwards."""
        self._own.send(response, flags=flags)

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return bool(self._own.is_cancelled())

    def ended(self, outcome: str) -> None:
        """Count the request under its outcome."""
        self._metrics.ended(self.variant, outcome)

    def followed(self, policy: str, rows: int) -> None:
        """Count the rows that a policy of one step answered."""
        self._metrics.followed(policy, 0, certified=True, rows=rows)

    def adapted(self, choice: str, *, degraded: bool) -> None:
        """Count the request under what was chosen for it."""
        self._metrics.adapted(choice, degraded=degraded)

    def waited(self, seconds: float) -> None:
        """Record how long the request waited."""
        self._metrics.waited(self.variant, seconds)

    def decoded(self, seconds: float) -> None:
        """Record how long its images took to decode."""
        self._metrics.decoded(self.variant, seconds)
