# SPDX-License-Identifier: Apache-2.0
"""One model's configuration: fields, backend, paths, versions, batches, queues, instances."""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from saccade.errors import SaccadeError
from saccade.serving.repository.config_text import messages, set_fields
from saccade.serving.repository.model_config import (
    LABELS_FILE,
    MAX_BATCH,
    OP_LIBRARY_FILE,
    RUN_BATCH,
)
from saccade.serving.repository.options import MOST_PRIORITIES, MOST_THREADS
from saccade.serving.repository.preflight.opened import OpenedModel
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.target import NEWER_FIELDS, Target
from saccade.serving.repository.stored_sample import FOLDER

_WHOLE = re.compile(r"[0-9]{1,9}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FOREIGN = ("ensemble_scheduling", "sequence_batching", "model_repository_agents", "runtime")


def check_config(model: OpenedModel, target: Target) -> Iterator[str]:
    """The text can be parsed, and its fields are known to the server."""
    try:
        config = model.parsed_config()
    except SaccadeError as error:
        yield str(error)
        return
    for field, line in sorted(_newer(config)):
        if not target.knows(line):
            yield f"field {field} came with {line}; {target.title} would refuse to load the model."


def check_backend(model: OpenedModel, target: Target) -> Iterator[str]:
    """The model's own name, and the backend of this kind of repository."""
    config, served = model.config, model.served
    if config.name != model.name:
        yield f"its configuration is named {config.name!r}, its folder {model.name!r}."
    if (config.backend, config.platform) != (served.backend, served.platform):
        found = config.platform or config.backend
        yield f"its backend is {found!r}, expected {served.backend!r}."
    for field in _FOREIGN:
        if config.HasField(field) if field != "runtime" else config.runtime:
            yield f"its configuration has {field}, which saccade does not write."
    if config.response_cache.enable:
        yield "the response cache is on: equal images would be answered from a cache."


def check_paths(model: OpenedModel, target: Target) -> Iterator[str]:
    """Every file that the configuration names is a plain name of a file that is there."""
    for field, name, folder in _named_files(model.config, model):
        if not _PLAIN.fullmatch(name) or name.startswith(".."):
            yield f"{field} is {name!r}, expected the plain name of a file."
        elif not (folder / name).is_file():
            yield f"{field} is {name!r}, but {folder.name} has no such file."
        elif field.startswith("label_filename") and name != LABELS_FILE:
            yield f"{field} is {name!r}, expected {LABELS_FILE!r}."
        elif field == "op_library_filename" and name != OP_LIBRARY_FILE:
            yield f"{field} is {name!r}, expected {OP_LIBRARY_FILE!r}."


def check_versions(model: OpenedModel, target: Target) -> Iterator[str]:
    """The version folder 1, no other, and a policy that serves it."""
    # The server takes the number in front of a folder's name: `1.old` is version 1 again.
    found = sorted(
        path.name for path in model.folder.iterdir() if path.is_dir() and path.name[:1].isdigit()
    )
    if found != ["1"]:
        yield f"its version folders are {', '.join(found) or 'none'}, expected 1 alone."
    policy = model.config.version_policy
    if policy.HasField("specific") and 1 not in policy.specific.versions:
        yield f"version_policy serves {list(policy.specific.versions)}, but not version 1."


def check_batches(model: OpenedModel, target: Target) -> Iterator[str]:
    """Batch sizes within what the model takes; queues with limits that can be met."""
    config = model.config
    largest = config.max_batch_size
    # The server makes a queue for each priority, and a thread for each of the threads.
    if not 1 <= largest <= MAX_BATCH:
        yield f"max_batch_size is {largest}, expected 1 to {MAX_BATCH}."
        return
    batching = config.dynamic_batching
    for size in batching.preferred_batch_size:
        if not 1 <= size <= largest:
            yield f"preferred_batch_size is {size}, expected 1 to max_batch_size, {largest}."
    for warmup in config.model_warmup:
        if not 1 <= warmup.batch_size <= largest:
            yield f"warm-up {warmup.name!r} is of batch {warmup.batch_size}, above {largest}."
    if batching.priority_levels > MOST_PRIORITIES:
        yield f"priority_levels is {batching.priority_levels}, expected at most {MOST_PRIORITIES}."
    if len(config.model_warmup) > 2:
        yield f"it has {len(config.model_warmup)} warm-ups, expected 2 at most."
    if batching.priority_levels and not (
        1 <= batching.default_priority_level <= batching.priority_levels
    ):
        yield (
            f"default_priority_level is {batching.default_priority_level}, expected 1 to "
            f"{batching.priority_levels}."
        )
    run_batch = config.parameters[RUN_BATCH].string_value if RUN_BATCH in config.parameters else ""
    if run_batch and not (run_batch.isdecimal() and 1 <= int(run_batch) <= largest):
        yield f"{RUN_BATCH} is {run_batch!r}, expected 1 to {largest}."


def check_instances(model: OpenedModel, target: Target) -> Iterator[str]:
    """Instances on a device that the server and this machine have."""
    groups = list(model.config.instance_group)
    kinds = [group.Kind.Name(group.kind) for group in groups]
    if len(groups) != 1 or not 1 <= groups[0].count <= MAX_BATCH:
        found = [group.count for group in groups]
        yield f"instance groups of {found} instances, expected one group of 1 to {MAX_BATCH}."
    allowed = model.served.kinds
    for kind in kinds:
        if kind not in allowed:
            yield f"instance kind is {kind}, expected {' or '.join(allowed)}."
        elif kind == "KIND_GPU" and target.bundled:
            yield "instance kind is KIND_GPU; the backend of the bundled server runs on KIND_CPU."
    if "KIND_GPU" in kinds and not target.bundled and not target.gpus:
        raise NotChecked("its instances run on a GPU, and there is none at hand")


def check_parameters(model: OpenedModel, target: Target) -> Iterator[str]:
    """Parameters that the backend reads, with numbers in them."""
    for key, value in sorted(model.config.parameters.items()):
        if key not in model.served.parameters:
            yield f"parameter {key!r} is not known to the {model.runtime} backend."
        elif not _WHOLE.fullmatch(value.string_value):
            yield f"parameter {key!r} is {value.string_value!r:.40}, expected a whole number."
        elif int(value.string_value) > MOST_THREADS:
            yield f"parameter {key!r} is {value.string_value}, expected at most {MOST_THREADS}."
    level = model.config.optimization.graph.level
    if level not in (-1, 0, 1, 2):
        yield f"optimization graph level is {level}, expected -1, 0, 1 or 2."


def _newer(config: Any) -> set[tuple[str, str]]:
    found = set()
    for field, values in set_fields(config):
        name = f"{config.DESCRIPTOR.name}.{field.name}"
        if name in NEWER_FIELDS:
            found.add((name, NEWER_FIELDS[name]))
        for value in values:
            if hasattr(value, "DESCRIPTOR"):
                found |= _newer(value)
    return found


def _named_files(config: Any, model: OpenedModel) -> Iterator[tuple[str, str, Any]]:
    if config.default_model_filename:
        yield "default_model_filename", config.default_model_filename, model.version
    for capability, name in sorted(config.cc_model_filenames.items()):
        yield f"cc_model_filenames of {capability}", name, model.version
    for name in config.model_operations.op_library_filename:
        yield "op_library_filename", name, model.version
    for tensor in config.output:
        if tensor.label_filename:
            yield f"label_filename of {tensor.name}", tensor.label_filename, model.folder
    for warmup in config.model_warmup:
        for name, tensor in sorted(warmup.inputs.items()):
            if tensor.WhichOneof("input_data_type") == "input_data_file":
                yield f"warm-up data of {name}", tensor.input_data_file, model.folder / FOLDER


def type_name(number: int) -> str:
    """The name of a data type, such as TYPE_FP32."""
    return str(messages().DataType.Name(number))


def check_labels(model: OpenedModel, target: Target) -> Iterator[str]:
    """A label for each class, a line each, as the manifest has them."""
    lines = label_lines(model)
    for tensor in model.config.output:
        if tensor.label_filename and list(tensor.dims) != [-1] and len(lines) != tensor.dims[-1]:
            yield f"{LABELS_FILE} has {len(lines)} labels, {tensor.name} {tensor.dims[-1]} classes."
            return
    yield from differing_labels(lines, model.manifest.labels)


def label_lines(model: OpenedModel) -> list[str]:
    """The labels of a model.

    Raises: SaccadeError if they cannot be read.
    """
    try:
        return (model.folder / LABELS_FILE).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SaccadeError(f"{LABELS_FILE} cannot be read ({error}).") from error


def differing_labels(found: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    """Where the labels depart from those of the manifest."""
    for number, (here, there) in enumerate(zip_longest(found, expected), start=1):
        if here != there:
            yield f"line {number} of {LABELS_FILE} is {here!r:.80}, expected {there!r:.80}."
            return
