# SPDX-License-Identifier: Apache-2.0
"""One small inference of a model, to see whether it answers."""

import json
import queue
import time
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
    """Result of a probe: no reason means that the model answered.

    `late` is set where nothing at all came back in time, `unreachable` where no connection was
    to be had. `lanes` is what the router told of its
    own: for each variant and component its progress and what waits.
    """

    model: str
    reason: str = ""
    late: bool = False
    unreachable: bool = False
    lanes: tuple[dict[str, Any], ...] = ()


class Prober:
    """Sends probes over one connection and collects what comes back; nothing here waits.

    A probe that is late stays out: a call that is cancelled costs the server more than one that
    waits. Units: timeout_s is seconds, after which a probe is late.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._client = connect_alone(url)
        self._requests: dict[str, dict[str, Any]] = {}
        self._answers: queue.SimpleQueue[Probe] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}

    def ask(self, model: str) -> bool:
        """Send a probe, unless one of this model is still out. Returns whether it was sent."""
        from tritonclient.utils import InferenceServerException

        if model in self._asked:
            return False
        self._asked[model] = time.monotonic()

        def answered(result: Any, error: Any) -> None:
            self._answers.put(self._judge(model, result, error))

        try:
            if model not in self._requests:
                self._requests[model] = self._request(model)
            self._client.async_infer(model, callback=answered, **self._requests[model])
        except InferenceServerException as error:
            answered(None, error)
        return True

    def forget(self, model: str) -> None:
        """Let a model be asked anew: its process has gone, and perhaps the probe with it."""
        self._asked.pop(model, None)

    def answers(self, wait_s: float = 0) -> list[Probe]:
        """Probes that came to an end; waits for the first up to `wait_s` seconds."""
        probes = []
        try:
            probes.append(
                self._answers.get(timeout=wait_s) if wait_s else self._answers.get_nowait()
            )
            while True:
                probes.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        for probe in probes:
            self._asked.pop(probe.model, None)
        return probes

    def late(self) -> dict[str, float]:
        """Models whose probe has had no answer in time, and for how many seconds it is out."""
        now = time.monotonic()
        out = {model: now - asked for model, asked in self._asked.items()}
        return {model: seconds for model, seconds in out.items() if seconds > self.timeout_s}

    def late_probe(self, model: str) -> Probe:
        """The probe of a model that has not answered in time."""
        return Probe(model, f"no answer within {self.timeout_s:g} s", late=True)

    def all_of(self, models: tuple[str, ...]) -> list[Probe]:
        """Probe these models and wait for each."""
        for model in models:
            self.ask(model)
        probes: dict[str, Probe] = {}
        end = time.monotonic() + self.timeout_s + 1
        while len(probes) < len(models) and time.monotonic() < end:
            probes |= {probe.model: probe for probe in self.answers(0.1)}
        return [probes.get(model) or self.late_probe(model) for model in models]

    def is_busy(self, model: str) -> bool | None:
        """True if the model has made an inference within the last deadline, for any caller.

        None where the server itself does not say.
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
    """Zeros of the shapes that a model declares, or a small picture where it takes files.

    Whole numbers are ones: as sizes, counts, lengths and ids all models take them. Of a router
    `wanted` says which of its inputs make a request, and with which parameters.
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
    """A black PNG of 8 x 8 pixels."""
    return encoded([np.zeros((8, 8), np.uint8)])[0]
