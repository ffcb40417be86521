# SPDX-License-Identifier: Apache-2.0
"""Probes: one small inference per model, to see whether it answers."""

import json
import queue
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.serving.client.connection import connect_alone
from saccade.serving.client.images import encoded
from saccade.serving.client.router_view import LANES, PROBE, probe_of
from saccade.serving.client.rpc_errors import is_queue_full, is_unreachable, short

_STATISTICS_S = 0.5


@dataclass(frozen=True)
class Probe:
    """Result of a probe; without a reason, the model answered.

    `late` is set if nothing came back in time, and `unreachable` if there was no connection.
    `lanes` is the router's report on its lanes: the progress of each variant and component, and
    what is waiting.
    """

    model: str
    reason: str = ""
    late: bool = False
    unreachable: bool = False
    lanes: tuple[dict[str, Any], ...] = ()


class Prober:
    """Sends probes over one connection and collects the answers without blocking.

    A late probe is left running, because a cancelled call costs the server more than a waiting
    one.

    Units: timeout_s is the time in seconds after which a probe is late.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._client = connect_alone(url)
        self._requests: dict[str, dict[str, Any]] = {}
        self._answers: queue.SimpleQueue[tuple[float, Probe]] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}

    def ask(self, model: str) -> bool:
        """Send a probe unless one to this model is still running; return whether it was sent."""
        from tritonclient.utils import InferenceServerException

        if model in self._asked:
            return False
        asked = self._asked[model] = time.monotonic()

        def answered(result: Any, error: Any) -> None:
            self._answers.put((asked, self._judge(model, result, error)))

        try:
            if model not in self._requests:
                self._requests[model] = self._request(model)
            self._client.async_infer(model, callback=answered, **self._requests[model])
        except InferenceServerException as error:
            answered(None, error)
        return True

    def forget(self, model: str) -> None:
        """Allow a new probe of a model whose process has gone; drop the answer to a running one."""
        self._asked.pop(model, None)

    def answers(self, wait_s: float = 0) -> list[Probe]:
        """Return the finished probes; wait up to `wait_s` seconds for the first one."""
        came = []
        with suppress(queue.Empty):
            came.append(self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait())
            while True:
                came.append(self._answers.get_nowait())
        probes = []
        for asked, probe in came:
            if self._asked.get(probe.model) == asked:  # otherwise it was forgotten
                del self._asked[probe.model]
                probes.append(probe)
        return probes

    def late(self) -> dict[str, float]:
        """Return the models whose probe is late, and how many seconds ago it was sent."""
        now = time.monotonic()
        out = {model: now - asked for model, asked in self._asked.items()}
        return {model: seconds for model, seconds in out.items() if seconds > self.timeout_s}

    def late_probe(self, model: str) -> Probe:
        """Return the result of a probe that was not answered in time."""
        return Probe(model, f"no answer within {self.timeout_s:g} s", late=True)

    def all_of(self, models: tuple[str, ...]) -> list[Probe]:
        """Probe these models and wait for all of them."""
        for model in models:
            self.ask(model)
        probes: dict[str, Probe] = {}
        end = time.monotonic() + self.timeout_s + 1
        while len(probes) < len(models) and time.monotonic() < end:
            probes |= {probe.model: probe for probe in self.answers(0.1)}
        return [probes.get(model) or self.late_probe(model) for model in models]

    def is_busy(self, model: str) -> bool | None:
        """Return True if the model has run an inference for any caller within the last deadline.

        None if the server does not report it.
        """
        from tritonclient.utils import InferenceServerException

        try:
            statistics = self._client.get_inference_statistics(model, client_timeout=_STATISTICS_S)
        except InferenceServerException:
            return None
        newest_ms = max((one.last_inference for one in statistics.model_stats), default=0)
        return time.time() - newest_ms / 1000 < self.timeout_s

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _request(self, model: str) -> dict[str, Any]:
        metadata = self._client.get_model_metadata(model, client_timeout=self.timeout_s)
        config = self._client.get_model_config(model, client_timeout=self.timeout_s)
        return probe_request(metadata, probe_of(config))

    def _judge(self, model: str, result: Any, error: Any) -> Probe:
        if error is None:
            return Probe(model, lanes=_lanes(result))
        if is_queue_full(error):
            return Probe(model)
        return Probe(model, short(error), unreachable=is_unreachable(error))


def _lanes(result: Any) -> tuple[dict[str, Any], ...]:
    lanes = result.as_numpy(LANES)
    return () if lanes is None else tuple(json.loads(lanes.tobytes()))


def probe_request(metadata: Any, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a request with zeros in the model's shapes, or a small image if it takes files.

    Integers are ones, which all models accept as sizes, counts, lengths and ids. For a router,
    `wanted` contains the inputs and parameters of the request.
    """
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.utils import triton_to_np_dtype

    inputs = []
    for declared in metadata.inputs:
        if wanted is not None and declared.name not in wanted["inputs"]:
            continue
        shape = [max(1, size) for size in declared.shape]
        tensor = InferInput(declared.name, shape, declared.datatype)
        if declared.datatype == "BYTES":
            tensor.set_data_from_numpy(np.full(shape, small_picture(), dtype=object))
        else:
            make = np.ones if declared.datatype == "INT64" else np.zeros
            tensor.set_data_from_numpy(make(shape, triton_to_np_dtype(declared.datatype)))
        inputs.append(tensor)
    parameters = wanted["parameters"] if wanted else {}
    request = {"inputs": inputs, **({"parameters": parameters} if parameters else {})}
    if PROBE in parameters:
        request["outputs"] = [InferRequestedOutput(LANES)]
    return request


def small_picture() -> bytes:
    """Return a black PNG of 8 x 8 pixels."""
    return encoded([np.zeros((8, 8), np.uint8)])[0]
