# SPDX-License-Identifier: Apache-2.0
"""The router's folder in a repository: its code, its routes, and its description for callers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.files import json_bytes
from saccade.exporter.artefact.frontier import FrontierEntry, cost_shares
from saccade.exporter.artefact.manifest import VariantFiles, encoded, filled, label_order
from saccade.model_repository.router.routes import SCHEMA as ROUTES_SCHEMA
from saccade.model_repository.router.routes import VERSION as ROUTES_VERSION
from saccade.model_repository.router.routes import AdaptiveRules, MonitorRules, PolicyRoute
from saccade.model_repository.router.spaces import FILE as SPACES_FILE
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entry_of
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.results import paired_log_ratio
from saccade.serving.client.router_view import DESCRIBED, FIRST_ROW, LANES, PROBE, SPACE
from saccade.serving.repository.checks import join, shared_outputs
from saccade.serving.repository.model_config import (
    LABELS_FILE,
    MAX_BATCH,
    add_output,
    config_text,
    dims_of,
    messages,
    set_common_fields,
    type_of,
)
from saccade.serving.repository.policies import ADAPTIVE, KEY, MONITOR

# Files of saccade.models that also run in the server: they import only numpy and Pillow.
SHARED = ("image_decoding.py", "rand_index.py")
MAX_ROUTES_BYTES = 64 << 20  # enough for a vocabulary in the runtime metadata of every variant
# A gRPC message has at most 2 GiB, and an image of 1,000 megapixels takes 3 GB when decoded.
MOST = {
    "max_image_mib": 1024,
    "max_megapixels": 1000,
    "max_side_px": 65_535,
    "min_side_px": 65_535,
    "max_images": MAX_BATCH,
}
LARGEST_INPUT_PX = 16_384  # side of the model's own input


@dataclass(frozen=True)
class RouterPlan:
    """Everything that is known about a router before its folder is written.

    Shapes: classes[variant] float32 [labels d].
    """

    model: str
    variants: tuple[VariantFiles, ...]
    preprocessing: Preprocessing | None
    labels: tuple[str, ...]
    classes: dict[str, np.ndarray]
    measured: dict[str, FrontierEntry]
    run_batch: dict[str, int]
    instances: int = 1  # of each variant
    routers: int = 1  # processes that share the requests
    max_images: int = MAX_BATCH
    policies: tuple[PolicyRoute, ...] = ()
    adaptive: AdaptiveRules | None = None
    monitor: MonitorRules | None = None
    spaces: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of the router's spaces

    @property
    def family(self) -> str:
        """Family of the model; of a group, that of one of its members."""
        return self.variants[0].main.variant.family

    @property
    def budgets(self) -> dict[str, float]:
        """Budgets of the variants by name; see `cost_shares`."""
        return cost_shares(self.variants, self.measured)

    def images(self, variant: VariantFiles) -> Preprocessing | None:
        """Return a variant's preprocessing, with the caps of the router."""
        if self.preprocessing is None or variant.preprocessing is None:
            return None
        caps = {name: getattr(self.preprocessing, name) for name in MOST}
        return replace(variant.preprocessing, **caps)


def write_router(place: Path, plan: RouterPlan) -> None:
    """Write the router's folder.

    Raises: SaccadeError if one router cannot answer for all variants.
    """
    (place / "1").mkdir(parents=True)
    for name, source in router_code(plan.family).items():
        (place / "1" / name).write_bytes(source)
    for variant, vectors in plan.classes.items():
        np.save(place / "1" / f"{variant}.npy", vectors, allow_pickle=False)
    if plan.spaces:
        np.savez(place / "1" / SPACES_FILE, **plan.spaces)
    (place / "1" / "routes.json").write_bytes(json_bytes(routes_content(plan)))
    (place / "config.pbtxt").write_text(router_text(plan), "utf-8")
    write_labels(place, plan.labels)


def routes_content(plan: RouterPlan) -> dict[str, Any]:
    """Return the router's routes to its variants, as plain values for JSON."""
    return {
        "schema": ROUTES_SCHEMA,
        "version": ROUTES_VERSION,
        "model": plan.model,
        "family": plan.family,
        "preprocessing": plan.preprocessing.to_dict() if plan.preprocessing else None,
        "parts": _parts(plan),
        "variants": [route_fields(plan, variant) for variant in plan.variants],
        **({KEY: [asdict(policy) for policy in plan.policies]} if plan.policies else {}),
        **({ADAPTIVE: asdict(plan.adaptive)} if plan.adaptive else {}),
        **({MONITOR: asdict(plan.monitor)} if plan.monitor else {}),
    }


def router_text(plan: RouterPlan) -> str:
    """Return the router's configuration, which has neither measurements nor sizes of a run.

    The router takes encoded images or tensors, and returns the chosen variant's outputs and name.
    It has no warm-up, because the server would refuse its calls to the variants with "Server not
    ready". If there are several inputs, all are optional: those in a request select the component.

    Raises: SaccadeError if one router cannot answer for all variants.
    """
    config = messages().ModelConfig(name=plan.model, backend="python")
    models = [part.variant.name for one in plan.variants for part in one.components.values()]
    description = json.dumps(_description(plan), sort_keys=True)
    # The repository index is closed to clients: a parameter lists the variants for them.
    for key, value in {"variants": ",".join(models), DESCRIBED: description}.items():
        config.parameters[key].string_value = value
    inner = entry_of(plan.family).inner
    parts = [
        part
        for variant in plan.variants
        for role, part in variant.components.items()
        if role not in inner
    ]
    files = {name for part in parts for name in encoded(part)}
    inputs = _joined([spec for part in parts for spec in part.inputs], plan.model)
    for spec in inputs:
        config.input.add(
            name=spec.name,
            data_type="TYPE_STRING" if spec.name in files else type_of(spec),
            dims=[1] if spec.name in files else dims_of(spec),
            optional=len(inputs) > 1,
        )
    for spec in _outputs(plan):
        add_output(config, spec, bool(plan.labels))
    for output in ("variant", "variant_sha256"):
        # Bytes, not TYPE_STRING: a request for classes of a string crashes servers before 25.08.
        config.output.add(name=output, data_type="TYPE_UINT8", dims=[-1])
    if plan.policies or plan.adaptive:
        config.output.add(name="steps", data_type="TYPE_INT32", dims=[1])
        for output in ("certified", "degraded"):
            config.output.add(name=output, data_type="TYPE_BOOL", dims=[1])
    config.output.add(name=LANES, data_type="TYPE_UINT8", dims=[-1])
    # One request at a time: the lanes make the batches. Passing several at a time to the router
    # costs as much, and the server would refuse all of them for a broken one, with its message.
    config.max_batch_size = plan.max_images
    set_common_fields(config)
    config.instance_group.add(count=plan.routers, kind="KIND_CPU")
    return config_text(config)


def _outputs(plan: RouterPlan) -> tuple[TensorSpec, ...]:
    entry = entry_of(plan.family)
    answers = entry.router_outputs
    if answers is None:
        roles = [role for role in plan.variants[0].components if role not in entry.inner]
        shared = [spec for role in roles for spec in _shared(plan, role)]
        outputs = _joined(shared, plan.model)
    else:
        answered = {role: part.outputs for role, part in plan.variants[0].components.items()}
        outputs = imported(answers)(plan.model, answered)
    if not plan.classes:
        return outputs
    scores = ("logits", "probabilities")
    return (*outputs, *(TensorSpec(name, f"b {len(plan.labels)}", "float32") for name in scores))


def write_labels(place: Path, labels: Sequence[str]) -> None:
    """Write the labels next to a model's configuration, one per line."""
    (place / LABELS_FILE).write_bytes(labels_text(labels))


def labels_text(labels: Sequence[str]) -> bytes:
    """Return the content of the file of labels."""
    return "".join(f"{label}\n" for label in labels).encode()


def router_code(family: str) -> dict[str, bytes]:
    """Return the files of the router's code in this release, by name.

    Raises: SaccadeError if there is no such family.
    """
    folder = resources.files("saccade.model_repository") / "router"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name[-3:] == ".py"}
    for name in SHARED:
        files[name] = (resources.files("saccade.models") / name).read_bytes()
    own = resources.files(FAMILIES[family]) if (entry := entry_of(family)).router else None
    for name, source in entry.router.items():
        assert own is not None and name not in files, f"{name} is a file of the router's own"
        files[name] = (own / source).read_bytes()
    return files


def route_fields(plan: RouterPlan, variant: VariantFiles) -> dict[str, Any]:
    """Return the fields of one variant from which the router chooses."""
    entry = plan.measured.get(variant.name)
    return {
        "name": variant.name,
        "sha256": variant.sha256,
        "budget": plan.budgets[variant.name],
        "setting": variant.main.variant.setting,
        "precision": variant.main.variant.precision,
        "multiply_adds": variant.multiply_adds,
        "run_batch": plan.run_batch[variant.name],
        "instances": plan.instances,
        "parts": {role: component.variant.name for role, component in variant.components.items()},
        "facts": variant.runtime_metadata,
        "classes": f"{variant.name}.npy" if variant.name in plan.classes else None,
        "score_name": entry.score.name if entry else None,
        "score_unit": entry.score.unit if entry else None,
        "score": entry.score.value if entry else None,
        "lower_bound": entry.score.interval[0] if entry else None,
        "inferences_per_second": entry.speed if entry else None,
        "p95_ms": entry.p95_ms if entry else None,
        "as_fast": list(_as_fast(plan, entry)) if entry else [],
        **_own_form(plan, variant),
    }


def _own_form(plan: RouterPlan, variant: VariantFiles) -> dict[str, Any]:
    """Return what may differ between variants: use, form of images, order of labels."""
    form: dict[str, Any] = {"step_only": True} if variant.main.step_only else {}
    if (images := plan.images(variant)) is not None and images != plan.preprocessing:
        form["preprocessing"] = images.to_dict()
    if not plan.classes and (order := label_order(plan.labels, variant.labels)):
        form["order"] = list(order)
    return form


def _shared(plan: RouterPlan, role: str) -> tuple[TensorSpec, ...]:
    manifests = [variant.components[role] for variant in plan.variants]
    return shared_outputs(manifests, plan.model)


def _as_fast(plan: RouterPlan, entry: FrontierEntry) -> Iterator[str]:
    """Yield the other variants whose measured speed is not significantly different."""
    for other in plan.measured.values():
        rounds = entry.speed_rounds, other.speed_rounds
        # Older measurements have a single figure: it decides as in older releases.
        if other.variant != entry.variant and len(rounds[0]) > 1 and len(rounds[1]) > 1:
            low, high = paired_log_ratio(*rounds)
            if low <= 0 <= high:
                yield other.variant


def _parts(plan: RouterPlan) -> dict[str, Any]:
    return {
        role: {
            "inputs": [asdict(spec) for spec in component.inputs],
            "outputs": [asdict(spec) for spec in _shared(plan, role)],
            "optional": list(filled(component)),
            "encoded": list(encoded(component)),
        }
        for role, component in plan.variants[0].components.items()
    }


def _joined(specs: Sequence[TensorSpec], model: str) -> tuple[TensorSpec, ...]:
    by_name: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        by_name.setdefault(spec.name, []).append(spec)
    return tuple(join(same_name, model) for same_name in by_name.values())


def _description(plan: RouterPlan) -> dict[str, Any]:
    """Return the description for clients and probes: shared metadata and that of each variant."""
    every = [variant.runtime_metadata for variant in plan.variants]
    shared = {
        key: value
        for key, value in every[0].items()
        if all(key in metadata and metadata[key] == value for metadata in every)
    }
    first, first_row = plan.variants[0].main, entry_of(plan.family).first_row
    space = next((policy.full for policy in plan.policies if policy.embeds), None)
    return {
        "family": plan.family,
        "facts": shared,
        "variants": {
            variant.name: {
                "sha256": variant.sha256,
                "setting": variant.main.variant.setting,
                "facts": {k: v for k, v in variant.runtime_metadata.items() if k not in shared},
            }
            for variant in plan.variants
        },
        "parts": _parts(plan),
        "labels": bool(plan.labels),
        **({FIRST_ROW: first_row} if first_row else {}),
        **({KEY: [policy.name for policy in plan.policies]} if plan.policies else {}),
        **({SPACE: space} if space else {}),
        **({ADAPTIVE: _without_shares(plan.adaptive)} if plan.adaptive else {}),
        "probe": {
            "inputs": [spec.name for spec in first.inputs if spec.name not in filled(first)],
            "parameters": {PROBE: "lanes"},
        },
    }


def _without_shares(adaptive: AdaptiveRules) -> dict[str, Any]:
    content = asdict(adaptive)
    del content["shares"]
    return content


def absurd_caps(declared: Preprocessing) -> Iterator[str]:
    """Describe each cap that is above its limit."""
    for name, most in MOST.items():
        if (value := getattr(declared, name)) > most:
            yield f"{name} is {value}, expected at most {most}"
    sides = {"height_px": declared.height_px, "width_px": declared.width_px}
    sides |= {f"resize_px[{at}]": side for at, side in enumerate(declared.resize_px)}
    for name, side in sides.items():
        if side > LARGEST_INPUT_PX:
            yield f"{name} is {side}, expected at most {LARGEST_INPUT_PX}"
