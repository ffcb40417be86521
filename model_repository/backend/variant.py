# SPDX-License-Identifier: Apache-2.0
"""A variant in the bundled server, apart from the server: its configuration, its session, its runs.

A backend reads the fields of config.pbtxt that NVIDIA's backend of the same name reads, and refuses
to load a model whose configuration needs others. It adds one parameter, `saccade_run_batch`: the
largest number of images in one run. A larger batch is run in parts, since larger is not faster.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

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


class BackendVariant:
    """One variant with its session, which a backend opens.

    Raises: ValueError for a configuration that the backend does not support.
    """

    parameters: tuple[str, ...]  # that it reads, besides RUN_BATCH
    fields: frozenset[str] = frozenset()  # of the configuration that it reads besides READ_HERE
    optimization: frozenset[str] = frozenset()  # the same, of the field `optimization`

    def __init__(self, config: dict[str, Any], version: Path, kind: str) -> None:
        """`version` is the folder of its files, and `kind` that of its instances."""
        if kind != "CPU":
            raise ValueError(f"instance kind is {kind}, but this backend runs on KIND_CPU only")
        for what in self._unsupported(config):
            raise ValueError(f"this {config['backend']} backend does not support {what}")
        self.run_batch = whole(config, RUN_BATCH) or max(1, config["max_batch_size"])
        self.run = self.open(
            config, version / (config.get("default_model_filename") or "model.onnx")
        )
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.ranks = {tensor["name"]: 1 + len(tensor["dims"]) for tensor in config["input"]}

    def open(self, config: dict[str, Any], path: Path) -> Run:
        """Open the file as configured.

        Raises: ValueError for a value that it cannot use.
        """
        raise NotImplementedError

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
