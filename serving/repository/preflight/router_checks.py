# SPDX-License-Identifier: Apache-2.0
"""The router: this release's code, and routes that lead to the models that are there."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.export.artefact.variant_files import VariantParts, encoded, filled, grouped
from saccade.models.families import entry_of
from saccade.models.preprocessing import Preprocessing
from saccade.serving.client.router_view import DESCRIBED
from saccade.serving.repository.image_caps import MOST, absurd_caps
from saccade.serving.repository.model_config import MAX_BATCH, data_type
from saccade.serving.repository.preflight.config_checks import differing_labels, label_lines
from saccade.serving.repository.preflight.opened import Opened
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.requirements import MENDED_LINE, strings_in
from saccade.serving.repository.router_folder import ROUTES_SCHEMA, ROUTES_VERSION, router_code

_CONTENT = {"schema", "version", "model", "family", "preprocessing", "parts", "variants"}
_ROUTE = {
    "name", "sha256", "budget", "setting", "precision", "multiply_adds", "run_batch", "parts",
    "facts", "classes", "score_name", "score_unit", "score", "lower_bound",
    "inferences_per_second", "p95_ms",
}  # fmt: skip


def check_router_code(repository: Opened, target: Target) -> Iterator[str]:
    """The code in the router's folder is that of this release: it is run, so it is compared."""
    folder = repository.router.version
    expected = router_code(str(repository.routes["family"]))
    present = {path.name: path for path in folder.iterdir() if path.suffix != ".npy"}
    for name in sorted(set(expected) - set(present)):
        yield f"{name} is missing from the router's code."
    for name in sorted(set(present) - set(expected) - {"routes.json"}):
        yield f"{name} is not a file of the router's code."
    for name in sorted(set(expected) & set(present)):
        if present[name].read_bytes() != expected[name]:
            yield f"{name} is not the router's code of this release of saccade."


def check_router_config(repository: Opened, target: Target) -> Iterator[str]:
    """The router is a Python model before the variants that the description names."""
    config = repository.router.config
    if (config.name, config.backend) != (repository.deployment.model, "python"):
        yield f"it is {config.name!r} with backend {config.backend!r}, expected python's."
    groups = [(each.count, type(each).Kind.Name(each.kind)) for each in config.instance_group]
    if groups != [(1, "KIND_CPU")]:
        # A second instance would have lanes, and bounds, of its own.
        yield f"its instances are {groups}, expected one of KIND_CPU."
    if config.model_warmup:
        yield "it has a warm-up, whose calls would come before the variants are ready."
    if not target.knows(MENDED_LINE) and (strings := strings_in(config)):
        yield (
            f"{', '.join(strings)} are strings, and one request that asks for their classes ends "
            f"a server older than {MENDED_LINE}. Run `saccade repository` again."
        )
    said = config.parameters["variants"].string_value if "variants" in config.parameters else ""
    if said.split(",") != list(repository.deployment.variants):
        yield f"it names the variants {said!r}, expected those of the description."
    if not 1 <= config.max_batch_size <= MAX_BATCH:
        yield f"its max_batch_size is {config.max_batch_size}, expected 1 to {MAX_BATCH}."
    for model in repository.models:
        if config.max_batch_size > model.config.max_batch_size:
            yield (
                f"its max_batch_size is {config.max_batch_size}, {model.name} takes "
                f"{model.config.max_batch_size}."
            )


def check_routes(repository: Opened, target: Target) -> Iterator[str]:
    """Every route leads to models that are there, in the order of their budgets."""
    try:
        content = repository.routes
    except NotChecked as error:
        yield f"{error}."
        return
    found = content.get("schema"), content.get("version")
    if found != (ROUTES_SCHEMA, ROUTES_VERSION):
        yield f"routes.json is {found}, expected {(ROUTES_SCHEMA, ROUTES_VERSION)}."
        return
    if odd := set(content) ^ _CONTENT:
        yield f"routes.json does not have the keys that saccade writes ({min(odd)!r})."
        return
    grouped_models = grouped([each.manifest for each in repository.models])
    yield from _whose(repository, grouped_models)
    variants = {each.name: each for each in grouped_models}
    routes = {str(each["name"]): each for each in content["variants"]}
    for name in sorted(set(routes) ^ set(variants)):
        where = "has a route, but no model" if name in routes else "is a model without a route"
        yield f"{name} {where}."
    for name in sorted(set(routes) & set(variants)):
        yield from _route(repository, routes[name], variants[name])
    budgets = [float(each["budget"]) for each in content["variants"]]
    if budgets != sorted(budgets, reverse=True):
        yield f"budgets are in the order {budgets}, expected the largest first."


def _whose(repository: Opened, variants: Sequence[VariantParts]) -> Iterator[str]:
    """The routes are of these models' family and preprocessing, with caps that are some."""
    content = repository.routes
    family = variants[0].main.variant.family
    expected = repository.deployment.model, family
    if (content["model"], content["family"]) != expected:
        said = content["model"], content["family"]
        yield f"routes.json is of {said!r:.80}, expected {expected}."
    declared, promised = content["preprocessing"], variants[0].preprocessing
    if declared is None or promised is None:
        if (declared is None) != (promised is None):
            yield "routes.json and the manifests do not agree whether images are taken."
        return
    try:
        found = Preprocessing.from_dict(declared)
    except SaccadeError as error:
        yield f"routes.json: {error}"
        return
    for reason in absurd_caps(found):
        yield f"routes.json: {reason}."
    for name in sorted(set(declared) - set(MOST)):
        if declared[name] != promised.to_dict()[name]:
            yield (
                f"routes.json has the preprocessing {name} {declared[name]!r:.40}, its manifest "
                f"{promised.to_dict()[name]!r:.40}."
            )


def check_parts(repository: Opened, target: Target) -> Iterator[str]:
    """What the router takes and answers, by routes and configuration, is what the models do."""
    content, config = repository.routes, repository.router.config
    first = grouped([each.manifest for each in repository.models])[0]
    inner = entry_of(first.main.variant.family).inner
    inputs: dict[str, int] = {}
    for role, manifest in first.parts.items():
        part = content["parts"][role]
        for kind in ("inputs", "outputs"):
            found = [(each["name"], each["axes"], each["dtype"]) for each in part[kind]]
            expected = [(each.name, each.axes, each.dtype) for each in getattr(manifest, kind)]
            if found != expected:
                yield f"routes.json has the {kind} {found} for part {role!r}, expected {expected}."
        if [part["encoded"], part["optional"]] != [list(encoded(manifest)), list(filled(manifest))]:
            yield f"routes.json has other encoded or optional inputs for part {role!r}."
        if role not in inner:
            names = dict.fromkeys(encoded(manifest), "string")
            for spec in manifest.inputs:
                inputs[spec.name] = data_type(names.get(spec.name, spec.dtype))
    if {each.name: each.data_type for each in config.input} != inputs:
        yield f"its inputs are {[each.name for each in config.input]}, expected {list(inputs)}."
    outputs = {each.name for each in config.output}
    if missing := {"variant", "variant_sha256"} - outputs:
        yield f"it does not answer {min(missing)!r}."
    said = json.loads(config.parameters[DESCRIBED].string_value)
    hashes = {name: each["sha256"] for name, each in said["variants"].items()}
    if hashes != {str(each["name"]): each["sha256"] for each in content["variants"]}:
        yield "it describes to its callers other variants than its routes lead to."
    if said["parts"] != content["parts"]:
        yield "it describes to its callers other parts than routes.json has."


def check_router_labels(repository: Opened, target: Target) -> Iterator[str]:
    """The router's labels are the models', or as many as there are vectors of labels."""
    lines = label_lines(repository.router)
    variants = grouped([each.manifest for each in repository.models])
    zero_shot = any(each["classes"] is not None for each in repository.routes["variants"])
    if not zero_shot:
        yield from differing_labels(lines, variants[0].labels)


def _route(repository: Opened, route: dict[str, Any], variant: VariantParts) -> Iterator[str]:
    if route["sha256"] != variant.sha256:
        yield (
            f"the route of {variant.name} says SHA-256 {str(route['sha256'])[:12]}..., its files "
            f"make {variant.sha256[:12]}..."
        )
    if route["parts"] != {role: part.variant.name for role, part in variant.parts.items()}:
        yield f"the route of {variant.name} leads to {route['parts']}."
    entry = variant.main.variant
    expected = {
        "budget": entry.budget,
        "setting": entry.setting,
        "precision": entry.precision,
        "multiply_adds": variant.multiply_adds,
        "facts": variant.facts,
    }
    for key, value in expected.items():
        if route[key] != value:
            yield (
                f"the route of {variant.name} says {key} {route[key]!r:.80}, its manifest "
                f"{value!r:.80}."
            )
    if odd := set(route) ^ _ROUTE:
        yield f"the route of {variant.name} has or lacks {min(odd)!r}."
    for key in ("score", "lower_bound", "inferences_per_second", "p95_ms"):
        if route[key] is not None and not _is_figure(route[key]):
            yield f"the route of {variant.name} says {key} {route[key]!r:.40}, expected a number."
    if type(route["run_batch"]) is not int or not 1 <= route["run_batch"] <= MAX_BATCH:
        yield f"the route of {variant.name} has runs of {route['run_batch']!r:.80} images."
    if route["classes"] is not None:
        yield from _classes(repository, str(route["classes"]), variant)


def _classes(repository: Opened, name: str, variant: VariantParts) -> Iterator[str]:
    if name != f"{variant.name}.npy":
        yield f"the labels of {variant.name} are in {name!r}, expected {variant.name}.npy."
        return
    labels = label_lines(repository.router)
    try:
        # Mapped, so that a header that claims more than the file has is refused, not allocated.
        path = repository.router.version / name
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        yield f"the labels of {variant.name} cannot be read ({error})."
        return
    if vectors.ndim != 2 or len(vectors) != len(labels) or not np.isfinite(vectors).all():
        yield f"{name} has vectors of shape {vectors.shape} for {len(labels)} labels."


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(float(str(value)))
