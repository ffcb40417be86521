# SPDX-License-Identifier: Apache-2.0
"""The server's sender of one request's answer, which also counts what became of the request."""

from typing import Any

from metrics import Metrics


class Sender:
    """Sends as the server's own does; `variant` is set once it is chosen."""

    __slots__ = ("_metrics", "_own", "variant")

    def __init__(self, own: Any, metrics: Metrics) -> None:
        self._own, self._metrics, self.variant = own, metrics, ""

    @property
    def watched(self) -> Any:
        """What `Instrumentation` made of the server's own, where it watches."""
        return self._own

    def send(self, response: Any, flags: int) -> None:
        """Send an answer or an error; `ended` follows."""
        self._own.send(response, flags=flags)

    def is_cancelled(self) -> bool:
        """True if the caller has gone."""
        return bool(self._own.is_cancelled())

    def ended(self, outcome: str) -> None:
        """Count the request under its outcome."""
        self._metrics.ended(self.variant, outcome)

    def followed(self, policy: str, rows: int) -> None:
        """Count the rows that a policy of one step has answered."""
        self._metrics.followed(policy, 0, certified=True, rows=rows)

    def waited(self, seconds: float) -> None:
        """Count the time that it waited."""
        self._metrics.waited(self.variant, seconds)

    def decoded(self, seconds: float) -> None:
        """Count the time in which its images were decoded."""
        self._metrics.decoded(self.variant, seconds)
