# SPDX-License-Identifier: Apache-2.0
"""The repository that `saccade repository` would write for the models found, and differences.

A repository does not store the options that it was written with. They are read back from the
configurations if they are within their bounds. Everything else follows from the manifests.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.core.options import range_of
from saccade.exporter.artefact.manifest import SUFFIX, VariantFiles, grouped
from saccade.model_repository.router.spaces import FILE as SPACES_FILE
from saccade.models.preprocessing import Preprocessing
from saccade.serving.repository.model_config import (
    LABELS_FILE,
    MAX_BATCH,
    parse_config,
    plain_fields,
    variant_config,
)
from saccade.serving.repository.options import MOST_ROUTERS, RepositoryOptions
from saccade.serving.repository.policies import adaptive_of, monitor_of, policies_of
from saccade.serving.repository.preflight.repository import NotChecked, Repository, RepositoryModel
from saccade.serving.repository.router_folder import (
    MOST,
    RouterPlan,
    labels_text,
    router_code,
    router_text,
    routes_content,
)
from saccade.serving.repository.runtimes.served_runtime import ServedRuntime
from saccade.serving.repository.stored_sample import FILE, FOLDER, read_sample

Files = dict[str, bytes | None]  # file name -> content; None if another check compares the content
_WHOLE = re.compile(r"-?[0-9]{1,12}")
_BATCHING = "dynamic_batching"
_POLICY = f"{_BATCHING}.default_queue_policy"
# Option of `saccade repository` -> the field of a variant's configuration that it sets. Those of a
# runtime are in its `option_fields`.
_FIELDS = {
    "instance_count": "instance_group.count",
    "max_queue": f"{_POLICY}.max_queue_size",
    "queue_timeout_ms": f"{_POLICY}.default_timeout_microseconds",
    "priority_levels": f"{_BATCHING}.priority_levels",
}
_UNITS = {"queue_timeout_ms": 1000}  # how many units of the field make one unit of the option


_AGAIN = "Write the repository again."
_MOST_SHOWN = 80
_ABSENT: Any = object()


@dataclass(frozen=True)
class Bounds:
    """Bounds of a field whose value the operator may choose."""

    expected: str
    fit: Callable[[Any], bool]


def _whole(low: float, high: float) -> Bounds:
    def fit(value: Any) -> bool:
        text = str(value) if type(value) in (int, str) else ""
        return bool(_WHOLE.fullmatch(text)) and low <= int(text) <= high

    return Bounds(f"{low:.12g} to {high:.12g}", fit)


_TEXT = Bounds("a string or null", lambda value: value is None or isinstance(value, str))
_FIGURE = Bounds(
    "a number or null",
    lambda value: value is None or (type(value) in (int, float) and math.isfinite(value)),
)
_SHARE = Bounds(
    "above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1
)
_NAMES = Bounds(
    "a list of names",
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
)
_BATCH_SIZE = _whole(1, MAX_BATCH)


def free_fields(served: ServedRuntime) -> dict[str, Bounds]:
    """Return the fields that an operator may choose; any other has the value that saccade writes.

    They depend on the runtime that serves the model.
    """
    bounds = {field: _bounds(option) for option, field in _fields_of(served).items()}
    return {**bounds, "max_batch_size": _BATCH_SIZE}


def _fields_of(served: ServedRuntime) -> dict[str, str]:
    return {**_FIELDS, **served.option_fields}


def _bounds(option: str) -> Bounds:
    bounds, unit = range_of(RepositoryOptions, option), _UNITS.get(option, 1)
    return _whole(bounds.least * unit, bounds.most * unit)


_MEASURED = ("score", "lower_bound", "inferences_per_second", "p95_ms")
FREE_OF_ROUTES: dict[str, Bounds] = {
    **{f"variants.{name}": _TEXT for name in ("score_name", "score_unit")},
    **{f"variants.{name}": _FIGURE for name in _MEASURED},
    "variants.as_fast": _NAMES,
    "variants.instances": _bounds("instance_count"),
}

# Of a group, they are measured.
FREE_OF_GROUPS: dict[str, Bounds] = {"variants.budget": _SHARE}


def rendered_config(model: RepositoryModel) -> dict[str, Any]:
    """Return the configuration that saccade would write for a variant, as plain data.

    Raises: SaccadeError for options that its runtime does not have.
    """
    fields, manifest, run_batch = model.fields, model.manifest, _run_batch(model)
    options = _options(model)
    text = variant_config(
        manifest,
        model.served.config_fields(model, options, run_batch),
        options,
        run_batch=run_batch,
        max_batch=_largest(fields),
        sample=_sample_shapes(model),
    )
    return plain_fields(parse_config(text))


def rendered_files(model: RepositoryModel) -> Files:
    """Return the files that saccade would write into a variant's folder."""
    files: Files = dict.fromkeys({"config.pbtxt", model.name + SUFFIX, *model.served.files(model)})
    files[LABELS_FILE] = labels_text(model.manifest.labels)
    if model.sampled:
        files[f"{FOLDER}/{FILE}"] = None
    if _warmed_by_files(model):
        stored = read_sample(model.sample).inputs if model.sampled else {}
        for name in (spec.name for spec in model.manifest.inputs):
            files[f"{FOLDER}/{name}"] = stored[name].tobytes() if name in stored else None
    return files


def rendered_router(repository: Repository) -> dict[str, Any]:
    """Return the configuration that saccade would write for the router, as plain data."""
    return plain_fields(parse_config(router_text(_plan(repository))))


def rendered_routes(repository: Repository) -> dict[str, Any]:
    """Return the content of routes.json that saccade would write, without measurements."""
    content: dict[str, Any] = json.loads(json_bytes(routes_content(_plan(repository))))
    return content


def rendered_router_files(repository: Repository) -> Files:
    """Return the files that saccade would write into the router's folder."""
    first, vectors = variants_of(repository)[0], zero_shot(repository)
    files: Files = dict.fromkeys(["config.pbtxt", "1/routes.json"])
    files |= {f"1/{name}.npy": None for name in vectors}
    if any(policy.embeds for policy in policies_of(repository.routes)):
        files[f"1/{SPACES_FILE}"] = None
    files |= {f"1/{name}": code for name, code in router_code(first.main.variant.family).items()}
    # The operator chooses the labels of zero-shot vectors.
    files[LABELS_FILE] = None if vectors else labels_text(first.labels)
    return files


def variants_of(repository: Repository) -> tuple[VariantFiles, ...]:
    """Return the variants of the router, in the order of the description."""
    if not repository.models:
        raise NotChecked("no model could be opened")
    return grouped([model.manifest for model in repository.models])


def zero_shot(repository: Repository) -> list[str]:
    """Return the variants that have label vectors according to the routes."""
    there = {variant.name for variant in variants_of(repository)}
    said = [route["name"] for route in repository.routes["variants"] if route.get("classes")]
    return [name for name in said if name in there]


def _value_at(content: Any, field: str) -> Any:
    """Return the value of a field, taking the first item of lists; None if it is not set."""
    for key in field.split("."):
        content = content[0] if isinstance(content, list) and content else content
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _options(model: RepositoryModel) -> RepositoryOptions:
    chosen: dict[str, Any] = {}
    for option, field in _fields_of(model.served).items():
        if _bounds(option).fit(value := _value_at(model.fields, field)):
            unit = _UNITS.get(option, 1)
            number = int(value) / unit if unit > 1 else int(value)
            is_flag = isinstance(getattr(RepositoryOptions, option), bool)
            chosen[option] = bool(number) if is_flag else number
    on_gpu = _value_at(model.fields, "instance_group.kind") == "KIND_GPU"
    return RepositoryOptions(
        out=model.folder,
        runtime=model.runtime,
        engines=tuple(model.engines),
        instances="gpu" if on_gpu else None,
        rate_limit=_value_at(model.fields, "instance_group.rate_limiter.resources.name"),
        **chosen,
    )


def _largest(fields: dict[str, Any]) -> int:
    size = fields.get("max_batch_size")
    return int(size) if size is not None and _BATCH_SIZE.fit(size) else MAX_BATCH


def _run_batch(model: RepositoryModel) -> int:
    """Return the preferred batch size."""
    sizes = _value_at(model.fields, f"{_BATCHING}.preferred_batch_size") or [1]
    return sizes[0] if _whole(1, _largest(model.fields)).fit(sizes[0]) else 1


def _sample_shapes(model: RepositoryModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the warm-up data by input; empty if zeros warm the model up.

    Axes that are open in the manifest have the size that the configuration gives.
    """
    if not _warmed_by_files(model):
        return {}
    tensors = _value_at(model.fields, "model_warmup.inputs")
    shapes = {}
    for spec in model.manifest.inputs:
        said = [*map(int, tensors.get(spec.name, {}).get("dims", ())), *([1] * len(spec.shape))]
        pairs = zip(spec.shape[1:], said, strict=False)
        shapes[spec.name] = (1, *(size if isinstance(axis, str) else axis for axis, size in pairs))
    return shapes


def _warmed_by_files(model: RepositoryModel) -> bool:
    tensors = _value_at(model.fields, "model_warmup.inputs") or {}
    return any("input_data_file" in tensor for tensor in tensors.values())


def _plan(repository: Repository) -> RouterPlan:
    variants, routes = variants_of(repository), repository.routes
    preprocessing = _capped(routes["preprocessing"], variants[0].preprocessing)
    largest = preprocessing.max_images if preprocessing else _largest(repository.router.fields)
    own = {model.name: model for model in repository.models}
    return RouterPlan(
        model=repository.deployment.model,
        variants=variants,
        preprocessing=preprocessing,
        labels=tuple(repository.router.labels),
        # The outputs depend on whether label vectors exist, not on their values.
        classes={name: np.empty(0) for name in zero_shot(repository)},
        measured={},
        run_batch={
            variant.name: _run_batch(own[variant.main.variant.name]) for variant in variants
        },
        max_images=largest,
        policies=policies_of(routes),
        adaptive=adaptive_of(routes),
        monitor=monitor_of(routes),
    )


def free_of_router(repository: Repository) -> dict[str, Bounds]:
    """Return the fields of the router's configuration whose values an operator may choose."""
    counts = [_value_at(model.fields, "instance_group.count") for model in repository.models]
    most = min([MOST_ROUTERS, *(count for count in counts if isinstance(count, int))])
    return {"instance_group.count": _whole(1, most)}


def _capped(declared: Any, expected: Preprocessing | None) -> Preprocessing | None:
    """Return the model's preprocessing with the caps of the routes, if those are valid."""
    if declared is None or expected is None:
        return expected
    try:
        preprocessing = Preprocessing.from_dict(declared)
        return replace(expected, **{name: getattr(preprocessing, name) for name in MOST})
    except SaccadeError:
        return expected  # the check of the routes reports the fault


@dataclass(frozen=True)
class _Difference:
    place: str  # for messages: `input[image].dims`
    field: str  # without positions in lists: `input.dims`
    found: Any
    expected: Any


def differences(actual: Any, expected: Any, free: Mapping[str, Bounds]) -> Iterator[str]:
    """Describe each difference between the data found and the data that saccade would write.

    A field that saccade does not write is a difference, unless it is in `free`.
    """
    for difference in _compared(actual, expected, "", ""):
        bounds = free.get(difference.field)
        if bounds is None:
            yield _sentence(difference, _shown(difference.expected))
        elif difference.found is _ABSENT or not bounds.fit(difference.found):
            yield _sentence(difference, bounds.expected)


def _sentence(difference: _Difference, expected: str) -> str:
    if difference.found is _ABSENT:
        return f"{difference.place} is missing, expected {expected}. {_AGAIN}"
    if expected:
        return f"{difference.place} is {_shown(difference.found)}, expected {expected}. {_AGAIN}"
    return (
        f"{difference.place} is {_shown(difference.found)}, which saccade does not write. {_AGAIN}"
    )


def _compared(actual: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    if isinstance(actual, dict) and (
        isinstance(expected, dict) or (actual and expected is _ABSENT)
    ):
        there = {} if expected is _ABSENT else expected
        for key in sorted({*actual, *there}):
            name = key if key.isidentifier() else repr(key)  # `8.9` is one name, not two
            inner = (f"{each}.{name}" if each else name for each in (place, field))
            yield from _compared(actual.get(key, _ABSENT), there.get(key, _ABSENT), *inner)
    elif _are_lists_of_objects(actual, expected):
        for index, (here, there) in enumerate(zip_longest(actual, expected, fillvalue=_ABSENT)):
            if isinstance(here, dict) and isinstance(there, dict):
                name = there.get("name", index)
                yield from _compared(here, there, f"{place}[{name}]", field)
            else:
                # An extra item is reported whole: the operator may choose none of its fields.
                yield _Difference(f"{place}[{index}]", f"{field}[]", here, there)
    elif (type(actual), actual) != (type(expected), expected):
        yield from _inside(actual, expected, place, field)


def _inside(actual: Any, expected: Any, place: str, field: str) -> Iterator[_Difference]:
    """Yield the differences inside two strings if both are JSON objects."""
    inner: list[_Difference] = []
    if isinstance(actual, str) and isinstance(expected, str) and expected.startswith("{"):
        with suppress(ValueError, RecursionError):
            inner = list(_compared(json.loads(actual), json.loads(expected), place, field))
    yield from inner or [_Difference(place, field, actual, expected)]


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values) and any(
        isinstance(item, dict) for value in values for item in value
    )


def _shown(value: Any) -> str:
    """Return a value as text for a message; the empty string for an absent value."""
    if value is _ABSENT:
        return ""
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        text = f"[{', '.join(map(_in_list, value))}]"
    else:
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _in_list(value: Any) -> str:
    # 64-bit integers are strings in protobuf's JSON.
    return value if isinstance(value, str) and value.lstrip("-").isdecimal() else repr(value)
