# SPDX-License-Identifier: Apache-2.0
"""What the server is told of each model: the protobuf message in text form, never pasted strings.

Only fields that server 2.51 knows: one that it does not know stops the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.export.manifest import Manifest
from saccade.models.interface import TensorSpec
from saccade.plugins.errors import SaccadeError

MAX_BATCH = 64
LABELS_FILE = "labels.txt"
MODEL_FILE = "model.onnx"
RUN_BATCH = "saccade_run_batch"
_TYPES = {
    "uint8": "TYPE_UINT8", "float32": "TYPE_FP32", "int64": "TYPE_INT64", "string": "TYPE_STRING",
}  # fmt: skip


@dataclass(frozen=True)
class RouterTensors:
    """What the router takes and answers, and what clients and probes are told of it.

    `parameters` are texts by name; `labelled` says whether `probabilities` have labels.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    encoded: frozenset[str]  # inputs that come as encoded files
    parameters: dict[str, str]
    labelled: bool = True


def variant_config(
    manifest: Manifest, *, run_batch: int, op_library: str = "", labelled: bool = True
) -> str:
    """One part of a variant as an `onnxruntime` model, the same for both servers.

    Units:  run_batch is the number of images that run fastest in one call, as measured.
    Raises: SaccadeError for a tensor whose first axis is not the batch.
    """
    config = _messages().ModelConfig(
        name=manifest.variant.name, backend="onnxruntime", default_model_filename=MODEL_FILE
    )
    for spec in manifest.inputs:
        tensor = config.input.add(name=spec.name, data_type=_type(spec), dims=_dims(spec))
        _scalar(tensor, spec)
    for spec in manifest.outputs:
        _scalar(_output(config, spec, labelled), spec)
    if op_library:
        config.model_operations.op_library_filename.append(op_library)
    # One thread a run: two runs side by side use two cores better than one run on both.
    threads = {"intra_op_thread_count": "1", "inter_op_thread_count": "1", "execution_mode": "0"}
    for key, value in {**threads, RUN_BATCH: str(run_batch)}.items():
        config.parameters[key].string_value = value
    _batch(config, preferred=run_batch, max_batch=MAX_BATCH)
    for size in sorted({1, run_batch}):
        warmup = config.model_warmup.add(name=f"zeros of batch {size}", batch_size=size)
        for spec in manifest.inputs:
            warmup.inputs[spec.name].data_type = _messages().DataType.Value(_type(spec))
            warmup.inputs[spec.name].dims.extend(max(1, size) for size in _dims(spec))
            warmup.inputs[spec.name].zero_data = True
    return _text(config)


def router_config(
    name: str, tensors: RouterTensors, *, variants: Sequence[str], max_images: int
) -> str:
    """The router: encoded images or tensors in, the chosen variant's outputs and name out.

    It has no warm-up: its calls to the variants would be answered "Server not ready". Where
    there are several inputs all are optional: which of them come says which part is meant.
    """
    config = _messages().ModelConfig(name=name, backend="python")
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
        config.output.add(name=output, data_type="TYPE_STRING", dims=[1])
    _batch(config, preferred=1, max_batch=max_images)
    return _text(config)


def parse_config(text: str) -> Any:
    """The `ModelConfig` message of a config.pbtxt: compare these, not the text."""
    from google.protobuf import text_format

    return text_format.Parse(text, _messages().ModelConfig())


def _batch(config: Any, *, preferred: int, max_batch: int) -> None:
    config.max_batch_size = max_batch
    config.instance_group.add(count=1, kind="KIND_CPU")
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = 0
    if preferred > 1:
        batching.preferred_batch_size.append(preferred)
    # No queue policy. In the 24.10 line any of them (a size, a timeout) makes one in a few hundred
    # requests wait 500 ms where there is one instance. The router's lanes bound what waits.


def _messages() -> Any:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2


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


def _text(config: Any) -> str:
    from google.protobuf import text_format

    return text_format.MessageToString(config, as_utf8=True)
