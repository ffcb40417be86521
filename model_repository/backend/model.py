# SPDX-License-Identifier: Apache-2.0
"""The model that the bundled server's Python backends share: requests, batches, spans, refusals."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from runtime import VARIANT
from tracing import Clock, Spans, spans_of


class TritonPythonModel:
    """One variant as a Python model of the server."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session, or refuse the configuration."""
        config = json.loads(args["model_config"])
        self.name = config["name"]
        version = Path(args["model_repository"]) / args["model_version"]
        try:
            self.variant = VARIANT(config, version, args["model_instance_kind"])
        except ValueError as error:
            raise pb.TritonModelException(f"{self.name}: {error}") from None
        self.spans = spans_of(self.name, os.environ, pb.Logger.log_warn)

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
            for name in self.variant.inputs
        ]
        batch = [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]
        outputs = self.variant.run_in_parts(batch)
        responses, start = [], 0
        for request, own in zip(requests, parts[0], strict=True):
            stop = start + len(own)
            wanted = request.requested_output_names()
            tensors = [
                pb.Tensor(name, value[start:stop])
                for name, value in zip(self.variant.outputs, outputs, strict=True)
                if name in wanted
            ]
            responses.append(pb.InferenceResponse(tensors))
            start = stop
        return responses

    def _answer_alone(self, request: Any) -> Any:
        # The server passes an empty batch on without its first axis.
        for name, rank in self.variant.ranks.items():
            if pb.get_input_tensor_by_name(request, name).as_numpy().ndim < rank:
                text = f"variant '{self.name}': found a batch of 0 in '{name}', expected at least 1"
                return pb.InferenceResponse(error=pb.TritonError(text, pb.TritonError.INVALID_ARG))
        try:
            return self._answer([request])[0]
        except Exception as error:
            pb.Logger.log_error(f"{self.name}: a request failed: {error!r}")
            text = f"variant '{self.name}' could not run this request; see the server's log"
            return pb.InferenceResponse(error=pb.TritonError(text, pb.TritonError.INTERNAL))


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
