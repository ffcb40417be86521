# SPDX-License-Identifier: Apache-2.0
"""Write each model's configuration for the server: a protobuf message, never pasted strings.

Only fields that server 2.51 knows are used: an unknown field stops the load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import SaccadeError
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
    """Tensors of the router, and the parameters that describe it to clients and probes.

    `parameters` are strings by name. `labelled`: whether `probabilities` has labels. `marked`:
    whether requests may follow a policy or adapt to the load.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    encoded: frozenset[str]  # inputs that arrive as encoded files
    parameters: dict[str, str]
    labelled: bool = True
    marked: bool = False


@dataclass(frozen=True)
class Served:
    """The server's side of a component: its runtime, files and warm-up.

    `fields` are the fields that its runtime sets in the ModelConfig message.

    Shapes: sample[input] [1 ...], one per input; empty: warm up with zeros.
    """

    fields: Mapping[str, Any]
    options: RepositoryOptions | None = None  # None: every setting at its default
    max_batch: int = MAX_BATCH
    sample: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def variant_config(
    manifest: Manifest, *, run_batch: int, served: Served, labelled: bool = True
) -> str:
    """Return the configuration of one component of a variant.

    Units:  run_batch is the number of images per call that was measured to be fastest.
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
    """Return the configuration of the router.

    The router takes encoded images or tensors, and returns the chosen variant's outputs and name.
    It has no warm-up, because the server would refuse its calls to the variants with "Server not
    ready". If there are several inputs, all are optional: those in a request select the component.
    """
    config = messages().ModelConfig(name=name, backend="python")
    # The repository index is closed to clients: this parameter lists the variants for them.
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
        # Bytes, not TYPE_STRING: a request for classes of a string crashes servers before 25.08.
        config.output.add(name=output, data_type="TYPE_UINT8", dims=[-1])
    if tensors.marked:
        config.output.add(name="steps", data_type="TYPE_INT32", dims=[1])
        for output in ("certified", "degraded"):
            config.output.add(name=output, data_type="TYPE_BOOL", dims=[1])
    config.output.add(name=LANES, data_type="TYPE_UINT8", dims=[-1])
    _shared(config, max_batch=max_images, preferred=1)
    config.instance_group.add(count=1, kind="KIND_CPU")
    # One request at a time: if one request of a batch is broken, the server refuses the whole
    # batch with that request's message. The lanes make the batches.
    config.ClearField("dynamic_batching")
    return config_text(config)


def data_type(dtype: str) -> int:
    """Return the server's number for a type, given its name in a manifest."""
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
    """Return whether a model's configuration puts its instances on GPUs."""
    return any(group.kind == group.KIND_GPU for group in config.instance_group)


def _instances(config: Any, options: RepositoryOptions | None) -> None:
    kind = "KIND_GPU" if options and options.on_gpu else "KIND_CPU"
    group = config.instance_group.add(count=options.instance_count if options else 1, kind=kind)
    if options and options.rate_limit:
        # Every run takes the only unit of the device: the variants on a GPU run in turn.
        group.rate_limiter.resources.add(name=options.rate_limit, count=1)
        group.rate_limiter.priority = 1


def _queue(config: Any, options: RepositoryOptions | None) -> None:
    # No queue policy by default. In version 24.10, any queue policy (a size, a timeout) delays one
    # in a few hundred requests by 500 ms if there is one instance: the batcher waits for a free
    # instance and sometimes misses that there is one. The router's lanes limit what waits.
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
            # One sample: the server fills the batch by repeating it.
            tensor.dims.extend(sample[spec.name][1:] or (1,))
            tensor.input_data_file = spec.name
        else:
            tensor.dims.extend(max(1, axis) for axis in _dims(spec))
            tensor.zero_data = True


def _type(spec: TensorSpec) -> str:
    if spec.dtype not in _TYPES:
        raise SaccadeError(
            f"tensor {spec.name!r} has the type {spec.dtype}, expected {', '.join(_TYPES)}. "
            "Export again."
        )
    return _TYPES[spec.dtype]


def _dims(spec: TensorSpec) -> list[int]:
    batch, *rest = spec.shape
    if batch != "b":
        raise SaccadeError(
            f"tensor {spec.name!r} has axes {spec.axes!r}, expected 'b' first. Export again."
        )
    # The server has no tensors with a batch axis only: outside the model such a tensor is [b 1].
    return [axis if isinstance(axis, int) else -1 for axis in rest] or [1]


def _scalar(tensor: Any, spec: TensorSpec) -> None:
    """Remove the second axis again, inside the model, from a tensor with a batch axis only."""
    if len(spec.shape) == 1:
        tensor.reshape.SetInParent()


def _output(config: Any, spec: TensorSpec, labelled: bool) -> Any:
    return config.output.add(
        name=spec.name,
        data_type=_type(spec),
        dims=_dims(spec),
        label_filename=LABELS_FILE if labelled and spec.name == "probabilities" else "",
    )
