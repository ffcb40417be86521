# SPDX-License-Identifier: Apache-2.0
"""The router's folder in a repository: its code, its routes, and its description for callers."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.files import json_bytes
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.variant_files import VariantFiles, encoded, filled
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entry_of
from saccade.models.interface import TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.intervals import paired_log_ratio
from saccade.serving.client.router_view import DESCRIBED, FIRST_ROW, PROBE
from saccade.serving.repository.adaptive import KEY as ADAPTIVE
from saccade.serving.repository.adaptive import ServedAdaptive
from saccade.serving.repository.checks import join
from saccade.serving.repository.model_config import (
    LABELS_FILE,
    MAX_BATCH,
    RouterTensors,
    router_config,
)
from saccade.serving.repository.policies import KEY, ServedPolicy

# Files of saccade.models that also run in the server: they import only numpy and Pillow.
SHARED = ("image_decoding.py",)
ROUTES_SCHEMA, ROUTES_VERSION = "saccade.routes", 3
MAX_ROUTES_BYTES = 64 << 20  # enough for a vocabulary in the runtime metadata of every variant


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
    max_images: int = MAX_BATCH
    policies: tuple[ServedPolicy, ...] = ()
    adaptive: ServedAdaptive | None = None

    @property
    def family(self) -> str:
        """Family of the model."""
        return self.variants[0].main.variant.family


def write_router(place: Path, plan: RouterPlan) -> None:
    """Write the router's folder.

    Raises: SaccadeError if one router cannot answer for all variants.
    """
    (place / "1").mkdir(parents=True)
    for name, source in router_code(plan.family).items():
        (place / "1" / name).write_bytes(source)
    for variant, vectors in plan.classes.items():
        np.save(place / "1" / f"{variant}.npy", vectors, allow_pickle=False)
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
        **({KEY: [policy.to_dict() for policy in plan.policies]} if plan.policies else {}),
        **({ADAPTIVE: plan.adaptive.to_dict()} if plan.adaptive else {}),
    }


def router_text(plan: RouterPlan) -> str:
    """Return the router's configuration, which has neither measurements nor sizes of a run.

    Raises: SaccadeError if one router cannot answer for all variants.
    """
    models = [
        component.variant.name
        for variant in plan.variants
        for component in variant.components.values()
    ]
    return router_config(plan.model, _tensors(plan), variants=models, max_images=plan.max_images)


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
        "budget": variant.main.variant.budget,
        "setting": variant.main.variant.setting,
        "precision": variant.main.variant.precision,
        "multiply_adds": variant.multiply_adds,
        "run_batch": plan.run_batch[variant.name],
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
    }


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
            "outputs": [asdict(spec) for spec in component.outputs],
            "optional": list(filled(component)),
            "encoded": list(encoded(component)),
        }
        for role, component in plan.variants[0].components.items()
    }


def _tensors(plan: RouterPlan) -> RouterTensors:
    entry = entry_of(plan.family)
    outer = [
        component
        for variant in plan.variants
        for role, component in variant.components.items()
        if role not in entry.inner
    ]
    inputs = _joined([spec for component in outer for spec in component.inputs], plan.model)
    if entry.router_outputs is None:
        outputs = _joined([spec for component in outer for spec in component.outputs], plan.model)
    else:
        answered = {
            role: component.outputs for role, component in plan.variants[0].components.items()
        }
        outputs = imported(entry.router_outputs)(plan.model, answered)
    if plan.classes:
        axes = f"b {len(plan.labels)}"
        scores = (
            TensorSpec("logits", axes, "float32"),
            TensorSpec("probabilities", axes, "float32"),
        )
        outputs = (*outputs, *scores)
    return RouterTensors(
        inputs=inputs,
        outputs=outputs,
        encoded=frozenset(name for part in outer for name in encoded(part)),
        parameters={DESCRIBED: json.dumps(_description(plan), sort_keys=True)},
        labelled=bool(plan.labels),
        marked=bool(plan.policies or plan.adaptive),
    )


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
        **({ADAPTIVE: plan.adaptive.described()} if plan.adaptive else {}),
        "probe": {
            "inputs": [spec.name for spec in first.inputs if spec.name not in filled(first)],
            "parameters": {PROBE: "lanes"},
        },
    }
