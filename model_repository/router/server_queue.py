# SPDX-License-Identifier: Apache-2.0
"""How long requests wait in the server before the router receives them.

The server does not tell, so the router sends itself a probe through the server's queue, while there
are requests that adapt to the load.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb
from routes import Routes

EVERY_S = 0.05  # a probe costs about 2 ms of CPU time, in the server and in the router
CALM_LAG_S, CALM_EVERY_S = 0.005, 0.1  # while probes do not wait longer than this
RETRY_S = 1.0  # after a probe that failed
ACTIVE_S = 1.0  # after the last request, no probe is sent


class ServerQueue:
    """Measures the server's queue of one router with probes from a thread."""

    def __init__(self, model: str, routes: Routes, parameters: dict[str, str], output: str) -> None:
        """`parameters` and `output` are those of a probe."""
        self._model, self._parameters, self._output = model, parameters, output
        self._inputs = _inputs(routes)
        self._used_s = 0.0
        self._last_s = (0.0, 0.0)  # the last two probes: a queue lasts, a pause of the machine not
        self._asked_s: float | None = None
        self._warned = False
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def lag_s(self) -> float:
        """Seconds that a request waited before the router received it; 0 while it is unknown."""
        self._used_s = now_s = time.monotonic()
        asked_s = self._asked_s
        return max(min(self._last_s), 0.0 if asked_s is None else now_s - asked_s)

    @property
    def _pause_s(self) -> float:
        return EVERY_S if max(self._last_s) > CALM_LAG_S else CALM_EVERY_S

    def close(self) -> None:
        """Stop sending probes."""
        self._ended.set()

    def _serve(self) -> None:
        while not self._ended.wait(self._pause_s):
            if time.monotonic() - self._used_s > ACTIVE_S:
                self._last_s = (0.0, 0.0)
                continue
            try:
                self._probe()
            except Exception as error:  # such as while the server starts or stops
                self._asked_s, self._last_s = None, (0.0, 0.0)
                if self._ended.wait(RETRY_S) or self._warned:
                    continue
                self._warned = True
                pb.Logger.log_warn(f"the server's queue cannot be measured: {error!r}")

    def _probe(self) -> None:
        self._asked_s = asked_s = time.monotonic()
        tensors = [pb.Tensor(name, array) for name, array in self._inputs.items()]
        response = pb.InferenceRequest(
            model_name=self._model,
            inputs=tensors,
            requested_output_names=[self._output],
            parameters=self._parameters,
        ).exec()
        if response.has_error():
            raise RuntimeError(response.error().message())
        self._last_s = self._last_s[1], time.monotonic() - asked_s
        self._asked_s = None


def _inputs(routes: Routes) -> dict[str, np.ndarray]:
    """Return the smallest inputs that the server accepts for the first component."""
    component = next(iter(routes.components.values()))
    made = {}
    for spec in component.inputs:
        if spec.name in component.optional:
            continue
        if spec.name in component.encoded:
            made[spec.name] = np.array([[b""]], dtype=object)
            continue
        shape = [int(axis) if axis.isdigit() else 1 for axis in spec.axes.split()]
        made[spec.name] = np.zeros(shape if len(shape) > 1 else [1, 1], spec.dtype)
    return made
