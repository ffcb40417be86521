# SPDX-License-Identifier: Apache-2.0
"""The part that the bundled server's Python backends share: requests, batches, spans, refusals.

A backend reads the fields of config.pbtxt that NVIDIA's backend of the same name reads, and refuses
to load a model whose configuration needs others. It adds one parameter, `saccade_run_batch`: the
largest number of images in one run. A larger batch is run in parts, since larger is not faster.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from tracing import Clock, Spans, spans_of

RUN_BATCH = "saccade_run_batch"
# Fields that the server itself handles, or that do not affect how a batch is run.
SERVERS_OWN = {
    "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input",
    "output", "instance_group", "default_model_filename", "dynamic_batching", "metric_tags",
    "model_warmup", "response_cache", "model_metrics", "model_repository_agents",
}  # fmt: skip
READ_HERE = {"parameters", "optimization", "model_transaction_policy"}
SERVERS_OPTIMIZATION = {"priority", "input_pinned_memory", "output_pinned_memory"}
TENSOR_FIELDS = {"name", "data_type", "dims", "label_filename"}
# Takes the names of outputs and the inputs by name, and returns the outputs.
Run = Callable[[list[str], Mapping[str, np.ndarray]], list[np.ndarray]]


class BackendModel:
    """One variant with its session, which a backend opens."""

    parameters: tuple[str, ...]  # that it reads, besides RUN_BATCH
    fields: frozenset[str] = frozenset()  # of the configuration that it reads besides READ_HERE
    optimization: frozenset[str] = frozenset()  # the same, of the field `optimization`

    def open(self, config: dict[str, Any], path: Path) -> Run:
        """Open the file as configured.

        Raises: ValueError for a value that it cannot use.
        """
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session, or refuse the configuration."""
        config = json.loads(args["model_config"])
        self.name = config["name"]
        version = Path(args["model_repository"]) / args["model_version"]
        try:
            self.refuse_unknown(config, args)
            self.run_batch = whole(config, RUN_BATCH) or max(1, config["max_batch_size"])
            file = config.get("default_model_filename") or "model.onnx"
            self.run = self.open(config, version / file)
        except ValueError as error:
            raise pb.TritonModelException(f"{self.name}: {error}") from None
        self.spans = spans_of(self.name, os.environ, pb.Logger.log_warn)
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one answer per request, from one run of all requests."""
        if self.spans is None:
            return self._answer_all(requests)
        with traced(self.spans, self.name, requests):
            return self._answer_all(requests)

    def finalize(self) -> None:
        """Send the waiting spans."""
        if self.spans:
            self.spans.close()

    def _answer_all(self, requests: list[Any]) -> list[Any]:
        try:
            return self._answer(requests)
        except Exception as error:
            pb.Logger.log_error(f"{self.name}: a batch of {len(requests)} failed: {error!r}")
        # One bad request may have failed the whole batch: run each request alone.
        return [self._answer_alone(request) for request in requests]

    def _answer(self, requests: list[Any]) -> list[Any]:
        parts = [
            [pb.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self.inputs
        ]
        batch = [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]
        outputs = self.run_in_parts(batch)
        responses, start = [], 0
        for request, own in zip(requests, parts[0], strict=True):
            stop = start + len(own)
            wanted = request.requested_output_names()
            tensors = [
                pb.Tensor(name, value[start:stop])
                for name, value in zip(self.outputs, outputs, strict=True)
                if name in wanted
            ]
            responses.append(pb.InferenceResponse(tensors))
            start = stop
        return responses

    def _answer_alone(self, request: Any) -> Any:
        try:
            return self._answer([request])[0]
        except Exception as error:
            pb.Logger.log_error(f"{self.name}: a request failed: {error!r}")
            text = f"variant '{self.name}' could not run this request; see the server's log"
            return pb.InferenceResponse(error=pb.TritonError(text, pb.TritonError.INTERNAL))

    def run_in_parts(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for inputs of any number of rows, both in the configured order."""
        images = len(batch[0])
        if images <= self.run_batch:
            return self.run(self.outputs, dict(zip(self.inputs, batch, strict=True)))
        # Parts of nearly equal size: a last part of one image would cost as much as a small batch.
        edges = np.linspace(0, images, -(-images // self.run_batch) + 1).round().astype(int)
        runs = [
            self.run(
                self.outputs,
                {name: part[a:b] for name, part in zip(self.inputs, batch, strict=True)},
            )
            for a, b in pairwise(edges)
        ]
        return [np.concatenate(column) for column in zip(*runs, strict=True)]

    def refuse_unknown(self, config: dict[str, Any], args: dict[str, str]) -> None:
        """Refuse to load a configuration with a field that would otherwise be silently ignored."""
        if args["model_instance_kind"] != "CPU":
            kind = args["model_instance_kind"]
            raise ValueError(f"instance kind is {kind}, but this backend runs on KIND_CPU only")
        for what in self._unsupported(config):
            raise ValueError(f"this {config['backend']} backend does not support {what}")

    def _unsupported(self, config: dict[str, Any]) -> Iterator[str]:
        for field, value in config.items():
            if field not in SERVERS_OWN | READ_HERE | self.fields and not is_default(value):
                yield f"config field '{field}'"
        for tensor in (*config["input"], *config["output"]):
            for field, value in tensor.items():
                if field not in TENSOR_FIELDS and not is_default(value):
                    yield f"field '{field}' of tensor '{tensor['name']}'"
        if config.get("model_transaction_policy", {}).get("decoupled"):
            yield "decoupled models"
        for field, value in config.get("optimization", {}).items():
            if field not in SERVERS_OPTIMIZATION | self.optimization and not is_default(value):
                yield f"optimization '{field}'"
        known = (*self.parameters, RUN_BATCH)
        for key in config.get("parameters", {}):
            if key not in known:
                yield f"parameter '{key}', expected one of {', '.join(known)}"


@contextmanager
def traced(spans: Spans, model: str, requests: list[Any]) -> Iterator[None]:
    """Observe one run for these requests, with a span for each caller."""
    clock, began_s, runs = Clock(), time.monotonic(), []
    try:
        given = [json.loads(request.parameters() or "{}") for request in requests]
        runs = spans.run_spans("run", given, clock.ns(began_s))
    except Exception as error:
        pb.Logger.log_warn(f"a run could not be observed: {error!r:.200}")
    try:
        yield
    finally:
        for span in runs:
            span.set_attributes({"saccade.model": model, "saccade.requests": len(requests)})
            span.end(clock.ns(time.monotonic()))


def is_default(value: Any) -> bool:
    """Return whether a field has its default; the server fills in every field."""
    if isinstance(value, dict):
        return all(is_default(field) for field in value.values())
    return value in (None, False, 0, "", [], "FORMAT_NONE")


def given_parameters(config: dict[str, Any]) -> dict[str, str]:
    """Return the parameters of a configuration by name."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def whole(config: dict[str, Any], key: str) -> int:
    """Return a count from a parameter's text; 0 if it is not given.

    Raises: ValueError if it is not a count.
    """
    text = given_parameters(config).get(key, "0")
    if not text.isdecimal():
        raise ValueError(f"parameter '{key}' is {text!r}, expected a whole number")
    return int(text)
