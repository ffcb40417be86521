# SPDX-License-Identifier: Apache-2.0
"""The router's calls of models, and how its own callers are answered or refused."""

from threading import get_ident
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from backlog import Ticket
from instrumentation import called
from metrics import Metrics, code_of
from outcomes import FAILED, QUEUE_FULL, TIMEOUT, UNAVAILABLE, Refused

# The server's words for a dead process, a model that is being loaded, and a server that stops.
AWAY = ("is not healthy", "is not ready", "Server not ready", "no available versions")


def call(
    model: str, inputs: dict[str, np.ndarray], outputs: list[str], timeout_us: int
) -> dict[str, np.ndarray]:
    """Make one call of one model, with inputs and outputs by name.

    Raises: Refused if the model fails.
    """
    tensors = [pb.Tensor(name, np.ascontiguousarray(array)) for name, array in inputs.items()]
    with called(model, len(next(iter(inputs.values())))) as parameters:
        response = pb.InferenceRequest(
            model_name=model,
            inputs=tensors,
            requested_output_names=outputs,
            timeout=timeout_us,
            **parameters,
        ).exec()
        if response.has_error():
            raise failure(model, response.error())
    return {name: pb.get_output_tensor_by_name(response, name).as_numpy() for name in outputs}


def tensors_of(arrays: dict[str, np.ndarray]) -> list[Any]:
    """Return arrays as tensors of the server."""
    return [pb.Tensor(name, array) for name, array in arrays.items()]


def remaining_us(tickets: list[Ticket]) -> int:
    """Return the longest time that a caller of the group still waits; 0 if one waits forever."""
    left_s = max(ticket.left_s for ticket in tickets)
    return 0 if left_s == float("inf") else max(1, int(1e6 * left_s))


def failure(variant: str, error: Any) -> Refused:
    """Return the caller's error for a variant's error; the server's own words stay in its log."""
    # The server's code is always INTERNAL: only the words tell the causes apart.
    words = error.message()
    pb.Logger.log_warn(f"variant '{variant}' answered: {words}")
    if "maximum queue size" in words:
        text = (
            f"the queue of variant '{variant}' is full; send fewer requests at a time, or try "
            "again later"
        )
        return Refused(text, QUEUE_FULL)
    if "timeout" in words.lower():
        text = f"the request's timeout ran out in the queue of variant '{variant}'"
        return Refused(text, TIMEOUT)
    if any(phrase in words for phrase in AWAY):
        text = f"variant '{variant}' has died or is being loaded; try again in a second"
        return Refused(text, UNAVAILABLE)
    text = f"variant '{variant}' failed; see the server's log"
    return Refused(text, FAILED, of_inputs="not healthy" not in words)


def refuse(sender: Any, text: str, reason: str) -> None:
    """Answer with an error. If the caller cannot be reached, only log that."""
    try:
        sender.send(
            pb.InferenceResponse(error=pb.TritonError(text, code_of(reason))),
            flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
    except Exception as error:
        pb.Logger.log_error(f"an error could not be sent ({text}): {error!r}")
    sender.ended(reason)


def fail(sender: Any, text: str, error: Exception) -> None:
    """Answer with an internal error: the reason goes to the log, not to the caller."""
    pb.Logger.log_error(f"{text}: {error!r}")
    refuse(sender, f"{text}; see the server's log", FAILED)


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

    __slots__ = ("metrics", "variant", "watched")

    def __init__(self, watched: Any, metrics: Metrics, variant: str = "") -> None:
        """`watched` is the sender from `Instrumentation`."""
        self.watched, self.metrics, self.variant = watched, metrics, variant

    def send(self, response: Any, flags: int) -> None:
        """Send an answer or an error; call `ended` afterwards."""
        self.watched.send(response, flags=flags)

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return bool(self.watched.is_cancelled())

    def ended(self, outcome: str) -> None:
        """Count the request under its outcome."""
        self.metrics.ended(self.variant, outcome)

    def waited(self, seconds: float) -> None:
        """Record how long the request waited."""
        self.metrics.waited(self.variant, seconds)

    def decoded(self, seconds: float) -> None:
        """Record how long its images took to decode."""
        self.metrics.decoded(self.variant, seconds)
