# SPDX-License-Identifier: Apache-2.0
"""Configuration of each model for the server: the protobuf message as text, never pasted strings.

Only fields that server 2.51 knows: one that it does not know stops the load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.errors import SaccadeError
from saccade.exporter.artefact.manifest import Manifest
from saccade.models.interface import TensorSpec
from saccade.serving.client.router_view import LANES
from saccade.serving.repository.config_text import (
    config_text,
    messages,
    parse_config,
    set_plain_fields,
)
from saccade.serving.repository.options import RepositoryOptions

__all__ = ["MAX_BATCH", "parse_config", "router_config", "variant_config"]

MAX_BATCH = 64
LABELS_FILE = "labels.txt"
MODEL_FILE = "model.onnx"
OP_LIBRARY_FILE = "libsaccade_onnxruntime.so"
RUN_BATCH = "saccade_run_batch"
_TYPES = {
    "uint8": "TYPE_UINT8", "float32": "TYPE_FP32", "int64": "TYPE_INT64", "string": "TYPE_STRING",
}  # fmt: skip


@dataclass(frozen=True)
class RouterTensors:
    """Tensors of the router, and what clients and probes are told of it.

    `parameters` are texts by name; `labelled` says whether `probabilities` have labels, `follows`
    whether requests may follow a policy.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    encoded: frozenset[str]  # inputs that come as encoded files
    parameters: dict[str, str]
    labelled: bool = True
    follows: bool = False


@dataclass(frozen=True)
class Served:
    """Server's side of a component: its runtime, its files, and its warm-up.

    `fields` are what its runtime says in the ModelConfig message.
    Shapes: sample[input] [1 ...], one of each input; none: zeros.
    """

    fields: Mapping[str, Any]
    options: RepositoryOptions | None = None  # none: every setting as by default
    max_batch: int = MAX_BATCH
    sample: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def variant_config(
    manifest: Manifest, *, run_batch: int, served: Served, labelled: bool = True
) -> str:
    """One component of a variant.

    Units:  run_batch is the number of images that run fastest in one call, as measured.
    Raises: SaccadeError for a tensor whose first axis is not the batch.
    """
    config = messages().ModelConfig(name=manifest.variant.name)
    set_plain_fields(config, served.fields)
    for spec in manifest.inputs:
        tensor = config.input.add(name=spec.name, data_type=_type(spec), dims=_dims(spec))
        _scalar(tensor, spec)
    for spec in manifest.outputs:
        _scalar(_output(config, spec, labelled), spec)
    _shared(config, max_batch=served.max_batch, preferred=run_batch)
    _instances(config, served.options)
    _queue(config, served.options)
    for size in sorted({1, run_batch}):
        _warmup(config, manifest, size, served.sample)
    return config_text(config)


def router_config(
    name: str, tensors: RouterTensors, *, variants: Sequence[str], max_images: int
) -> str:
    """The router: encoded images or tensors in, the chosen variant's outputs and name out.

    It has no warm-up: its calls to the variants would be answered "Server not ready". Where
    there are several inputs all are optional: which of them come says which component is meant.
    """
    config = messages().ModelConfig(name=name, backend="python")
    # The repository index is closed to clients: here they learn which variants there are.
    for key, value in {"variants": ",".join(variants), **tensors.parameters}.items():
        config.parameters[key].string_value = value
    optional = len(tensors.inputs) > 1
    for spec in tensors.inputs:
        encoded = spec.name in tensors.encoded
        config.input.add(
            name=spec.name,
            data_type="TYPE_STRING" if encoded else _type(spec),
            dims=[1] if encoded else _dims(spec),
            optional=optional,
        )
    for spec in tensors.outputs:
        _output(config, spec, tensors.labelled)
    for output in ("variant", "variant_sha256"):
        # Bytes, not TYPE_STRING: the classes of a string end servers before July 2025.
        config.output.add(name=output, data_type="TYPE_UINT8", dims=[-1])
    if tensors.follows:
        config.output.add(name="steps", data_type="TYPE_INT32", dims=[1])
        config.output.add(name="certified", data_type="TYPE_BOOL", dims=[1])
    config.output.add(name=LANES, data_type="TYPE_UINT8", dims=[-1])
    _shared(config, max_batch=max_images, preferred=1)
    config.instance_group.add(count=1, kind="KIND_CPU")
    # One request at a time: of those that come as one batch, the server refuses all for the text
    # of one that is broken. The lanes make the batches.
    config.ClearField("dynamic_batching")
    return config_text(config)


def data_type(dtype: str) -> int:
    """The server's number of a type, by its name in a manifest."""
    return int(messages().DataType.Value(_TYPES[dtype]))


def _shared(config: Any, *, preferred: int, max_batch: int) -> None:
    config.max_batch_size = max_batch
    config.version_policy.specific.versions.append(1)
    config.response_cache.enable = False
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = 0
    if preferred > 1:
        batching.preferred_batch_size.append(preferred)


def on_gpu(config: Any) -> bool:
    """True if a model's configuration puts its instances on GPUs."""
    return any(group.kind == group.KIND_GPU for group in config.instance_group)


def _instances(config: Any, options: RepositoryOptions | None) -> None:
    kind = "KIND_GPU" if options and options.on_gpu else "KIND_CPU"
    group = config.instance_group.add(count=options.instance_count if options else 1, kind=kind)
    if options and options.rate_limit:
        # Every run takes the one unit that a device has: variants of a GPU run in turn.
        group.rate_limiter.resources.add(name=options.rate_limit, count=1)
        group.rate_limiter.priority = 1


def _queue(config: Any, options: RepositoryOptions | None) -> None:
    # By default no queue policy. In the 24.10 line any of them (a size, a timeout) makes one in a
    # few hundred requests wait 500 ms where there is one instance: the batcher then waits for a
    # free instance, and now and then misses that there is one. The router's lanes bound what waits.
    if options is None:
        return
    batching = config.dynamic_batching
    if options.max_queue is not None:
        batching.default_queue_policy.max_queue_size = options.max_queue
    if options.queue_timeout_ms is not None:
        microseconds = max(1, round(1000 * options.queue_timeout_ms))
        batching.default_queue_policy.default_timeout_microseconds = microseconds
        batching.default_queue_policy.timeout_action = 0  # REJECT
    if options.priority_levels is not None:
        batching.priority_levels = options.priority_levels
        batching.default_priority_level = (options.priority_levels + 1) // 2


def _warmup(config: Any, manifest: Manifest, size: int, sample: Mapping[str, Any]) -> None:
    kind = "a sample" if sample else "zeros"
    warmup = config.model_warmup.add(name=f"{kind} of batch {size}", batch_size=size)
    for spec in manifest.inputs:
        tensor = warmup.inputs[spec.name]
        tensor.data_type = messages().DataType.Value(_type(spec))
        if sample:
            # One sample: the server makes a batch of as many requests with it.
            tensor.dims.extend(sample[spec.name][1:] or (1,))
            tensor.input_data_file = spec.name
        else:
            tensor.dims.extend(max(1, axis) for axis in _dims(spec))
            tensor.zero_data = True


def _type(spec: TensorSpec) -> str:
    if spec.dtype not in _TYPES:
        raise SaccadeError(
            f"tensor {spec.name!r} holds {spec.dtype}, expected one of {', '.join(_TYPES)}. "
            "Export again."
        )
    return _TYPES[spec.dtype]


def _dims(spec: TensorSpec) -> list[int]:
    batch, *rest = spec.shape
    if batch != "b":
        raise SaccadeError(
            f"tensor {spec.name!r} has axes {spec.axes!r}, expected 'b' first. Export again."
        )
    # The server knows no tensor of the batch alone: it is one number wide outside.
    return [axis if isinstance(axis, int) else -1 for axis in rest] or [1]


def _scalar(tensor: Any, spec: TensorSpec) -> None:
    """A tensor of the batch alone loses the axis that it has outside."""
    if len(spec.shape) == 1:
        tensor.reshape.SetInParent()


def _output(config: Any, spec: TensorSpec, labelled: bool) -> Any:
    return config.output.add(
        name=spec.name,
        data_type=_type(spec),
        dims=_dims(spec),
        label_filename=LABELS_FILE if labelled and spec.name == "probabilities" else "",
    )
