# SPDX-License-Identifier: Apache-2.0
"""Write each model's configuration for the server: a protobuf message, never pasted strings.

Only fields that server 2.51 knows are used: an unknown field stops the load.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import read_regular
from saccade.exporter.artefact.manifest import Manifest
from saccade.models.interface import TensorSpec
from saccade.serving.repository.options import RepositoryOptions

MAX_BYTES = 1 << 20  # a configuration has a few kilobytes: a larger file is not a configuration
MAX_BATCH = 64
LABELS_FILE = "labels.txt"
MODEL_FILE = "model.onnx"
OP_LIBRARY_FILE = "libsaccade_onnxruntime.so"
RUN_BATCH = "saccade_run_batch"
_TYPES = {
    "uint8": "TYPE_UINT8", "float32": "TYPE_FP32", "int64": "TYPE_INT64", "string": "TYPE_STRING",
}  # fmt: skip


def variant_config(
    manifest: Manifest,
    fields: Mapping[str, Any],
    options: RepositoryOptions | None = None,
    *,
    run_batch: int,
    max_batch: int = MAX_BATCH,
    sample: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> str:
    """Return the configuration of one component of a variant.

    `fields` are those that its runtime sets in the ModelConfig message. Without `options`, every
    setting has its default.

    Shapes: sample[input] [1 ...], one per input; empty: warm up with zeros.
    Units:  run_batch is the number of images per call that was measured to be fastest.
    Raises: SaccadeError for a tensor whose first axis is not the batch.
    """
    config = messages().ModelConfig(name=manifest.variant.name)
    set_plain_fields(config, fields)
    for spec in manifest.inputs:
        tensor = config.input.add(name=spec.name, data_type=type_of(spec), dims=dims_of(spec))
        _scalar(tensor, spec)
    for spec in manifest.outputs:
        _scalar(add_output(config, spec, bool(manifest.labels)), spec)
    set_batches(config, max_batch, preferred=run_batch)
    _instances(config, options)
    _queue(config, options)
    for size in sorted({1, run_batch}):
        _warmup(config, manifest, size, sample)
    return config_text(config)


def data_type(dtype: str) -> int:
    """Return the server's number for a type, given its name in a manifest."""
    return int(messages().DataType.Value(_TYPES[dtype]))


def set_batches(config: Any, max_batch: int, *, preferred: int) -> None:
    """Set the largest and the preferred batch of a model.

    With a preferred size the server does not join calls that have it already, which would leave
    other instances without work.
    """
    config.max_batch_size = max_batch
    set_common_fields(config)
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = 0
    batching.preferred_batch_size.append(preferred)


def set_common_fields(config: Any) -> None:
    """Set what all models have in common."""
    config.version_policy.specific.versions.append(1)
    config.response_cache.enable = False


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
        tensor.data_type = messages().DataType.Value(type_of(spec))
        if sample:
            # One sample: the server fills the batch by repeating it.
            tensor.dims.extend(sample[spec.name][1:] or (1,))
            tensor.input_data_file = spec.name
        else:
            tensor.dims.extend(max(1, axis) for axis in dims_of(spec))
            tensor.zero_data = True


def type_of(spec: TensorSpec) -> str:
    """Return the server's name of a tensor's type.

    Raises: SaccadeError if it has none.
    """
    if spec.dtype not in _TYPES:
        raise SaccadeError(
            f"tensor {spec.name!r} has the type {spec.dtype}, expected {', '.join(_TYPES)}. "
            "Export again."
        )
    return _TYPES[spec.dtype]


def dims_of(spec: TensorSpec) -> list[int]:
    """Return the sizes of a tensor's axes after the batch; -1 for an open one.

    Raises: SaccadeError if the first axis is not the batch.
    """
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


def add_output(config: Any, spec: TensorSpec, labelled: bool) -> Any:
    """Add an output to a configuration; probabilities refer to the labels, if there are any."""
    return config.output.add(
        name=spec.name,
        data_type=type_of(spec),
        dims=dims_of(spec),
        label_filename=LABELS_FILE if labelled and spec.name == "probabilities" else "",
    )


def config_text(message: Any) -> str:
    """Return a message in protobuf's text form: fields in order of number, maps sorted by key."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(message, as_utf8=True))


def parse_config(text: str) -> Any:
    """Parse the text of a config.pbtxt into a `ModelConfig`. Compare these, not the texts."""
    from google.protobuf import text_format

    return text_format.Parse(text, messages().ModelConfig())


def read_config(path: Path) -> Any:
    """Read the `ModelConfig` message from a file.

    Raises: SaccadeError if the file cannot be read or parsed.
    """
    from google.protobuf import text_format

    try:
        return parse_config(read_regular(path, MAX_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(f"{path.name} cannot be read ({error}).") from error
    except text_format.ParseError as error:
        raise SaccadeError(f"{path.name} is not a valid ModelConfig ({error}).") from error


def messages() -> Any:
    """Return the module with the configuration's protobuf messages."""
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


def set_plain_fields(message: Any, fields: Mapping[str, Any]) -> None:
    """Set fields of a message by name from plain data; maps are dictionaries."""
    from google.protobuf import json_format

    json_format.ParseDict(dict(fields), message)


def plain_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` that are set, by name; parameters as strings.

    Values are as in protobuf's JSON: 64-bit integers are strings.
    """
    from google.protobuf import json_format

    fields: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    if message.parameters:
        fields["parameters"] = {
            key: parameter.string_value for key, parameter in message.parameters.items()
        }
    return fields
