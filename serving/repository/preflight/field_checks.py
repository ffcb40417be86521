# SPDX-License-Identifier: Apache-2.0
"""Configurations hold the fields that `saccade repository` writes, and no other.

A list of what is forbidden ends with the server's next release: `EXECUTION_ENV_PATH`, an agent or
a warm-up of four billion rounds are each one line of a configuration.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from saccade.export.artefact.variant_files import grouped
from saccade.serving.repository.config_text import config_text, is_map, parse_config, set_fields
from saccade.serving.repository.preflight.config_checks import label_lines
from saccade.serving.repository.preflight.opened import Opened, OpenedModel
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.router_folder import RouterPlan, router_text

_SHARED = {
    "name", "backend", "max_batch_size", "version_policy.specific.versions", "parameters",
    "parameters.string_value", "response_cache", "dynamic_batching",
    "dynamic_batching.preferred_batch_size", "instance_group.count", "instance_group.kind",
    "input.name", "input.data_type", "input.dims", "input.reshape",
    "output.name", "output.data_type", "output.dims", "output.reshape", "output.label_filename",
}  # fmt: skip
ROUTER_FIELDS = _SHARED | {"input.optional"}
VARIANT_FIELDS = _SHARED | {
    "platform", "default_model_filename", "cc_model_filenames",
    "model_operations.op_library_filename", "optimization.graph.level",
    "instance_group.rate_limiter.resources.name", "instance_group.rate_limiter.resources.count",
    "instance_group.rate_limiter.priority", "dynamic_batching.priority_levels",
    "dynamic_batching.default_priority_level",
    "dynamic_batching.default_queue_policy.max_queue_size",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "model_warmup.name", "model_warmup.batch_size", "model_warmup.inputs",
    "model_warmup.inputs.data_type", "model_warmup.inputs.dims", "model_warmup.inputs.zero_data",
    "model_warmup.inputs.input_data_file",
}  # fmt: skip
_MOST_SHOWN = 60


def check_variant_fields(model: OpenedModel, target: Target) -> Iterator[str]:
    """No field that no variant of saccade has."""
    yield from _foreign(model.config, VARIANT_FIELDS)


def check_router_fields(repository: Opened, target: Target) -> Iterator[str]:
    """The router's configuration is the one that is written for these models, word for word."""
    config = repository.router.config
    yield from _foreign(config, ROUTER_FIELDS)
    expected = config_text(_expected(repository)).splitlines()
    found = config_text(config).splitlines()
    for number, line in enumerate(found):
        there = expected[number] if number < len(expected) else "nothing"
        if line != there:
            yield (
                f"its configuration has {line.strip()!r:.{_MOST_SHOWN}} where saccade writes "
                f"{there.strip()!r:.{_MOST_SHOWN}}."
            )
            return
    if len(found) < len(expected):
        yield f"its configuration lacks {expected[len(found)].strip()!r:.{_MOST_SHOWN}}."


def _expected(repository: Opened) -> Any:
    if not repository.models:
        raise NotChecked("no model could be opened")
    variants = grouped([each.manifest for each in repository.models])
    said = repository.routes["variants"]
    plan = RouterPlan(
        model=repository.deployment.model,
        variants=variants,
        preprocessing=variants[0].preprocessing,
        labels=tuple(label_lines(repository.router)),
        # Whether there are vectors of labels decides what is answered, not what they are.
        classes={str(each["name"]): np.empty(0) for each in said if each["classes"] is not None},
        measured={},
        run_batch={},
        max_images=repository.router.config.max_batch_size,
    )
    return parse_config(router_text(plan))


def _foreign(config: Any, known: set[str]) -> Iterator[str]:
    for name in sorted(set(_names(config, ""))):
        if name not in known:
            yield f"its configuration has the field {name}, which saccade does not write there."


def _names(message: Any, prefix: str) -> Iterator[str]:
    """Every field that is set, by its way from the top; of a message with fields, those."""
    for field, values in set_fields(message):
        name = prefix + field.name
        for value in values:
            inner = value[1] if is_map(field) else value
            nested = list(_names(inner, f"{name}.")) if hasattr(inner, "DESCRIPTOR") else []
            yield from nested or [name]
