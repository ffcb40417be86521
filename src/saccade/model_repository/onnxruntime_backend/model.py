# SPDX-License-Identifier: Apache-2.0
"""The `onnxruntime` backend of the embedded server, in Python.

It reads the fields of config.pbtxt that NVIDIA's backend of the same name reads, and refuses
to load a model whose config asks for more. Its own one, `saccade_run_batch`, is the largest
number of images in one run: a batch above it is run in parts, since bigger is not faster.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from tracing import Clock, Spans, spans_of

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as saccade does: it must stand before this
import onnxruntime

RUN_BATCH = "saccade_run_batch"
INTEGERS = ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", RUN_BATCH)
SWITCHES = ("enable_mem_arena", "enable_mem_pattern")
# Fields the server itself acts on, or that have no say in how a batch is run.
SERVERS_OWN = {
    "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input",
    "output", "instance_group", "default_model_filename", "dynamic_batching", "metric_tags",
    "model_warmup", "response_cache", "model_metrics", "model_repository_agents",
}  # fmt: skip
READ_HERE = {"parameters", "model_operations", "optimization", "model_transaction_policy"}
SERVERS_OPTIMIZATION = {"graph", "priority", "input_pinned_memory", "output_pinned_memory"}
TENSOR_FIELDS = {"name", "data_type", "dims", "label_filename"}
LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class TritonPythonModel:
    """One session of one variant."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session, or refuse the config."""
        config = json.loads(args["model_config"])
        self.name = config["name"]
        try:
            refuse_unknown(config, args)
            self.run_batch, session = open_session(config, args)
        except ValueError as error:
            raise pb.TritonModelException(f"{self.name}: {error}") from None
        self.run = session.run
        self.spans = spans_of(self.name, os.environ, pb.Logger.log_warn)
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One answer for each request, from one run of all of them."""
        if self.spans is None:
            return self._answer_all(requests)
        with traced(self.spans, self.name, requests):
            return self._answer_all(requests)

    def finalize(self) -> None:
        """Send the spans that wait."""
        if self.spans:
            self.spans.close()

    def _answer_all(self, requests: list[Any]) -> list[Any]:
        try:
            return self._answer(requests)
        except Exception as error:
            pb.Logger.log_error(f"{self.name}: a batch of {len(requests)} failed: {error!r}")
        # One request may have spoilt the batch for its mates: each gets a run of its own.
        return [self._answer_alone(request) for request in requests]

    def _answer(self, requests: list[Any]) -> list[Any]:
        parts = [
            [pb.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self.inputs
        ]
        batch = [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]
        outputs = self._run_in_parts(batch)
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
            text = f"variant '{self.name}' could not run this request; the server's log says why"
            return pb.InferenceResponse(error=pb.TritonError(text, pb.TritonError.INTERNAL))

    def _run_in_parts(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        images = len(batch[0])
        if images <= self.run_batch:
            return self.run(self.outputs, dict(zip(self.inputs, batch, strict=True)))
        # Parts of nearly the same size: a last one of a single image would cost as a small batch.
        edges = np.linspace(0, images, -(-images // self.run_batch) + 1).round().astype(int)
        runs = [
            self.run(
                self.outputs,
                {name: part[a:b] for name, part in zip(self.inputs, batch, strict=True)},
            )
            for a, b in pairwise(edges)
        ]
        return [np.concatenate(column) for column in zip(*runs, strict=True)]


@contextmanager
def traced(spans: Spans, model: str, requests: list[Any]) -> Iterator[None]:
    """One run for these requests, as a span below each caller's."""
    clock, began_s, runs = Clock(), time.monotonic(), []
    try:
        given = [json.loads(request.parameters() or "{}") for request in requests]
        runs = spans.run_spans("run", given, clock.ns(began_s))
    except Exception as error:
        pb.Logger.log_warn(f"a run could not be watched: {error!r:.200}")
    try:
        yield
    finally:
        for span in runs:
            span.set_attributes({"saccade.model": model, "saccade.requests": len(requests)})
            span.end(clock.ns(time.monotonic()))


def refuse_unknown(config: dict[str, Any], args: dict[str, str]) -> None:
    """Stop the load for a field whose meaning would otherwise be silently lost."""
    if args["model_instance_kind"] != "CPU":
        raise ValueError(
            f"instance kind is {args['model_instance_kind']}, this backend runs on KIND_CPU only"
        )
    for field, value in config.items():
        if field not in SERVERS_OWN | READ_HERE and not is_default(value):
            raise ValueError(f"config field '{field}' is not known to this onnxruntime backend")
    for tensor in (*config["input"], *config["output"]):
        for field, value in tensor.items():
            if field not in TENSOR_FIELDS and not is_default(value):
                raise ValueError(
                    f"field '{field}' of tensor '{tensor['name']}' is not known to this "
                    "onnxruntime backend"
                )
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise ValueError("decoupled is not known to this onnxruntime backend")
    for field, value in config.get("optimization", {}).items():
        if field not in SERVERS_OPTIMIZATION and not is_default(value):
            raise ValueError(f"optimization '{field}' is not known to this onnxruntime backend")
    for key in config.get("parameters", {}):
        if key not in INTEGERS + SWITCHES:
            raise ValueError(
                f"parameter '{key}' is not known to this onnxruntime backend, which knows "
                + ", ".join(INTEGERS + SWITCHES)
            )


def is_default(value: Any) -> bool:
    """True if a field is as if it had not been written: the server fills in every field."""
    if isinstance(value, dict):
        return all(is_default(field) for field in value.values())
    return value in (None, False, 0, "", [], "FORMAT_NONE")


def open_session(
    config: dict[str, Any], args: dict[str, str]
) -> tuple[int, onnxruntime.InferenceSession]:
    """The session as the config wants it, and the number of images of one run."""
    given = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    numbers = {key: whole(key, given.get(key, "0")) for key in INTEGERS}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = numbers["intra_op_thread_count"]
    options.inter_op_num_threads = numbers["inter_op_thread_count"]
    if numbers["execution_mode"]:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    # A waiting thread that spins takes the core from the server and from the other variants.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = given.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = given.get("enable_mem_pattern", "1") != "0"
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    if level not in LEVELS:
        raise ValueError(f"optimization graph level is {level}, expected -1, 0, 1 or 2")
    options.graph_optimization_level = LEVELS[level]
    version = Path(args["model_repository"]) / args["model_version"]
    for library in config.get("model_operations", {}).get("op_library_filename", []):
        # NVIDIA's backend gives a bare name to the loader; here the file lies beside the model.
        options.register_custom_ops_library(str(version / library))
    path = version / (config.get("default_model_filename") or "model.onnx")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return numbers[RUN_BATCH] or max(1, config["max_batch_size"]), session


def whole(key: str, text: str) -> int:
    """A count from a parameter's text."""
    if not text.isdecimal():
        raise ValueError(f"parameter '{key}' is {text!r}, expected a whole number")
    return int(text)
