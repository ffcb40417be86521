# SPDX-License-Identifier: Apache-2.0
"""A request to the router's code, without a server: what it brings, and what became of it."""

import json
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np


def execute(router: Any, requests: Sequence[Any]) -> None:
    """Let a router execute requests, and deliver what it returns, as the server does."""
    for request, response in zip(requests, router.execute(requests), strict=True):
        if response is not None:
            request.send(response, flags=1)


class FakeRequest:
    """One request for encoded images, and the sender of its answer.

    Units: timeout is microseconds, as the server hands it on; `gone` is what a caller becomes.
    """

    def __init__(
        self,
        files: Sequence[bytes],
        outputs: Sequence[str],
        *,
        parameters: Mapping[str, Any],
        timeout: int = 0,
        identity: str = "",
    ) -> None:
        array = np.array(files, dtype=object).reshape(-1, 1)
        tensor = SimpleNamespace(
            name=lambda: "image", shape=lambda: list(array.shape), as_numpy=lambda: array
        )
        self.inputs = lambda: [tensor]
        self.parameters = lambda: json.dumps(parameters)
        self.timeout, self.request_id = (lambda: timeout), (lambda: identity)
        self.requested_output_names = lambda: list(outputs)
        self.get_response_sender = lambda: self
        self.response: Any = None
        self.gone, self._answered = False, threading.Event()

    def send(self, response: Any, flags: int) -> None:
        assert self.response is None, "answered twice"
        self.response = response
        self._answered.set()

    def is_cancelled(self) -> bool:
        return self.gone

    def answered(self) -> Any:
        """Return the response once it is there, whether it is an answer or an error."""
        assert self._answered.wait(60), "no answer"
        return self.response
