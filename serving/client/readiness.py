# SPDX-License-Identifier: Apache-2.0
"""Readiness of a server: probes of its models, and whether every variant answers."""

import json
import queue
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from saccade.serving.client.connection import connect_alone, is_queue_full, is_unreachable, short
from saccade.serving.client.images import encoded
from saccade.serving.client.router_view import LANES, PROBE, probe_of

State = Literal["starting", "serving", "restarting", "stopped", "failed"]
_STATISTICS_S = 0.5
# A model may take this many times as long as the largest batch should, by its measured pace.
PACE_TIMES = 3.0
_LARGEST_BATCH = 64  # samples of a request; a batch of the server has at most as many


@dataclass(frozen=True)
class Readiness:
    """Models that answered the last probe, and why the others did not; true if all did."""

    state: State
    model: str
    router: bool
    variants: dict[str, bool]
    reasons: dict[str, str] = field(default_factory=dict)
    new_connections: bool = True  # whether they are accepted
    busy: dict[str, str] = field(default_factory=dict)  # models that answer, but with a delay
    repository: str = ""  # SHA-256 of its saccade.json; empty if only the supervisor knows it

    @property
    def ready(self) -> bool:
        """True if the router and every variant answer, and new callers can connect."""
        answer = self.router and all(self.variants.values())
        return self.state == "serving" and answer and self.new_connections

    def __bool__(self) -> bool:
        return self.ready

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"ready": self.ready, **asdict(self)}


class Board:
    """What the supervisor knows about the models, readable from any thread."""

    def __init__(self, model: str, variants: tuple[str, ...], repository: str = "") -> None:
        self.model = model
        self.variants = variants
        self.repository = repository
        self._lock = threading.Lock()
        self._state: State = "starting"
        self._reasons: dict[str, str] = {}
        self._busy: dict[str, str] = {}
        self.reset("starting")

    def reset(self, state: State) -> None:
        """Enter a state in which no model answers."""
        with self._lock:
            self._state = state
            self._reasons = dict.fromkeys((self.model, *self.variants), state)
            self._busy = {}

    def enter(self, state: State) -> None:
        """Enter a state and keep what is known about each model."""
        with self._lock:
            self._state = state

    def describe(self, model: str, variants: tuple[str, ...], repository: str) -> None:
        """Switch to another repository, whose models all answer."""
        with self._lock:
            self.model, self.variants, self.repository = model, variants, repository
            self._reasons = {}

    def answering(self) -> set[str]:
        """Return the models that answered the last probe."""
        with self._lock:
            reasons = self._reasons
            return {name for name in (self.model, *self.variants) if not reasons.get(name)}

    def mark(self, name: str, reason: str) -> bool:
        """Note why a model does not answer, or `""` if it does; return whether that is new."""
        with self._lock:
            before = self._reasons.get(name, "")
            self._reasons[name] = reason
            return before != reason

    def mark_busy(self, name: str, text: str) -> None:
        """Note how many requests wait for a model that answers, or `""` if none do."""
        with self._lock:
            self._busy[name] = text

    def readiness(self) -> Readiness:
        """Return the current state."""
        with self._lock:
            reasons = {name: reason for name, reason in self._reasons.items() if reason}
            busy = {name: text for name, text in self._busy.items() if text}
            return Readiness(
                self._state,
                self.model,
                self.model not in reasons,
                {name: name not in reasons for name in self.variants},
                reasons,
                busy=busy,
                repository=self.repository,
            )


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
    seconds: float = 0.0  # until the answer, with the time that it waited

    @property
    def router(self) -> str:
        """Which of the router's processes reports; empty if its repository is of an old release."""
        return str(self.lanes[0].get("router", "")) if self.lanes else ""


class Prober:
    """Sends probes over one connection and collects the answers without blocking.

    A late probe is left running, because a cancelled call costs the server more than a waiting
    one. With `patient`, `all_of` waits for a late model as long as its pace allows.

    Units: timeout_s is the time in seconds after which a probe is late.
    """

    def __init__(self, url: str, timeout_s: float, *, patient: bool = False) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._patient = patient
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
            probe = self._judge(model, result, error)
            self._answers.put((asked, replace(probe, seconds=time.monotonic() - asked)))

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
        while len(probes) < len(models):
            if time.monotonic() >= end:
                left = self._patient and any(
                    self.is_at_work(model) for model in models if model not in probes
                )
                if not left:
                    break
                end = time.monotonic() + self.timeout_s
            probes |= {probe.model: probe for probe in self.answers(0.1)}
        return [probes.get(model) or self.late_probe(model) for model in models]

    def is_at_work(self, model: str) -> bool | None:
        """Return True if the model has run an inference recently, or may still run the probe.

        Recently is within the last deadline, or within the time that a few of its largest batches
        take by the server's statistics of all callers. None if the server does not report it.
        """
        from tritonclient.utils import InferenceServerException

        try:
            statistics = self._client.get_inference_statistics(model, client_timeout=_STATISTICS_S)
        except InferenceServerException:
            return None
        newest_ms = max((one.last_inference for one in statistics.model_stats), default=0)
        longest_s = max(map(longest_batch_s, statistics.model_stats), default=0.0)
        recent_s = max(self.timeout_s, PACE_TIMES * longest_s)
        out_s = time.monotonic() - self._asked.get(model, 0.0)
        return min(out_s, time.time() - newest_ms / 1000) < recent_s

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


def longest_batch_s(statistics: Any) -> float:
    """Return the time that a model's largest batch takes, from what smaller ones took on average.

    Only the largest batch that was run counts: samples in small batches may cost more.
    """
    runs = [batch for batch in statistics.batch_stats if batch.compute_infer.count]
    if not runs:
        return 0.0
    largest = max(runs, key=lambda batch: int(batch.batch_size))
    seconds = 1e-9 * largest.compute_infer.ns / largest.compute_infer.count
    return float(seconds * max(1.0, _LARGEST_BATCH / largest.batch_size))


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
