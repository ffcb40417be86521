# SPDX-License-Identifier: Apache-2.0
"""A variant's scores and cost as the frontier and the report hold them."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from saccade.export.artefact.frontier import Entry, Score
from saccade.export.artefact.manifest import Manifest
from saccade.export.artefact.variant_files import VariantParts
from saccade.export.runtimes.runtime import has_custom_ops
from saccade.machine import Machine
from saccade.models.families import entry_of
from saccade.models.scores.intervals import bootstrap
from saccade.models.scores.results import Found
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import InProcess

_BESIDE_THE_SCORE = "top-5"


def entry_of_found(
    variant: VariantParts,
    found: Found,
    measured: Mapping[tuple[str, str], InProcess],
    machine: Machine,
    ops: Ops,
) -> Entry:
    """The frontier's entry, before anything went through a server."""
    inside = measured[variant.name, ""].summary()
    for name, role in measured:
        if name == variant.name and role:
            inside[role] = measured[name, role].summary()
    top5 = [each.value for each in found.scores if each.name == _BESIDE_THE_SCORE]
    entry = variant.main.variant
    saved = entry_of(entry.family).embedding_saved
    return Entry(
        variant=variant.name,
        sha256=variant.sha256,
        budget=entry.budget,
        precision=entry.precision,
        runtime=machine.runtime,
        device=machine.device,
        score=_score(found),
        top5=round(top5[0], 6) if top5 else None,
        in_process=inside,
        grpc=None,
        embedding_bytes=embedding_bytes(variant.main) if saved else None,
        ops=ops if has_custom_ops(variant.parts.values()) else None,
    )


def further_scores(found: Found) -> list[dict[str, Any]]:
    """What the task found beside its score."""
    return [asdict(each) for each in found.scores[1:] if each.name != _BESIDE_THE_SCORE]


def cost(variant: VariantParts) -> dict[str, Any]:
    """What stands in the manifests of its files."""
    entry = variant.main.variant
    return {
        "kept": entry.kept,
        "total": entry.total,
        "unit": entry.unit,
        "files": [
            {
                "name": part.variant.name,
                "role": role,
                "sha256": part.file.sha256,
                "file_bytes": part.file.bytes,
                "parameters": part.cost.parameters,
                "multiply_adds": part.cost.multiply_adds.total,
                "multiply_adds_by_part": part.cost.multiply_adds.by_part,
                "peak_activation_bytes": part.cost.peak_activation_bytes,
            }
            for role, part in variant.parts.items()
        ],
    }


def _score(found: Found) -> Score:
    first = found.scores[0]
    low, high = first.interval or bootstrap(found.samples)
    return Score(
        name=first.name,
        value=round(first.value, 6),
        higher_is_better=first.higher_is_better,
        unit=first.unit,
        n=first.n,
        interval=(round(low, 6), round(high, 6)),
        data=found.data,
        data_sha256=found.data_sha256,
    )


def embedding_bytes(manifest: Manifest) -> int | None:
    """Of one embedding, where the variant answers with one of a fixed size."""
    spec = next((each for each in manifest.outputs if each.name == "embedding"), None)
    axes = spec.axes.split()[1:] if spec else []
    if spec is None or not all(axis.isdigit() for axis in axes):
        return None
    return math.prod(map(int, axes)) * np.dtype(spec.dtype).itemsize
