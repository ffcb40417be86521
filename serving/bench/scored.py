# SPDX-License-Identifier: Apache-2.0
"""A variant's scores and cost, as in the frontier and the report."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from saccade.core.machine import Machine
from saccade.exporter.artefact.frontier import FrontierEntry, MeasuredScore
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.runtimes.runtime import has_custom_ops
from saccade.models.families import entry_of
from saccade.models.scores.intervals import bootstrap
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import InProcessLoad

_BESIDE_THE_SCORE = "top-5"


def entry_of_result(
    variant: VariantFiles,
    result: EvaluationResult,
    measured: Mapping[tuple[str, str], InProcessLoad],
    machine: Machine,
    ops: Ops,
) -> FrontierEntry:
    """Return the frontier's entry with the measurements without a server."""
    inside = measured[variant.name, ""].summary()
    for name, role in measured:
        if name == variant.name and role:
            inside[role] = measured[name, role].summary()
    top5 = [score.value for score in result.scores if score.name == _BESIDE_THE_SCORE]
    entry = variant.main.variant
    saved = entry_of(entry.family).embedding_saved
    return FrontierEntry(
        variant=variant.name,
        sha256=variant.sha256,
        budget=entry.budget,
        precision=entry.precision,
        runtime=machine.runtime,
        device=machine.device,
        score=_score(result),
        top5=round(top5[0], 6) if top5 else None,
        in_process=inside,
        grpc=None,
        embedding_bytes=embedding_bytes(variant.main) if saved else None,
        ops=ops if has_custom_ops(variant.components.values()) else None,
    )


def further_scores(result: EvaluationResult) -> list[dict[str, Any]]:
    """Return the scores of the task other than its main score."""
    return [asdict(score) for score in result.scores[1:] if score.name != _BESIDE_THE_SCORE]


def cost(variant: VariantFiles) -> dict[str, Any]:
    """Return a variant's cost from the manifests of its files."""
    entry = variant.main.variant
    return {
        "kept": entry.kept,
        "total": entry.total,
        "unit": entry.unit,
        "files": [
            {
                "name": component.variant.name,
                "role": role,
                "sha256": component.file.sha256,
                "file_bytes": component.file.total_bytes,
                "parameters": component.cost.parameters,
                "multiply_adds": component.cost.multiply_adds.total,
                "multiply_adds_by_part": component.cost.multiply_adds.by_part,
                "peak_activation_bytes": component.cost.peak_activation_bytes,
            }
            for role, component in variant.components.items()
        ],
    }


def _score(result: EvaluationResult) -> MeasuredScore:
    first = result.scores[0]
    low, high = first.interval or bootstrap(result.samples)
    return MeasuredScore(
        name=first.name,
        value=round(first.value, 6),
        higher_is_better=first.higher_is_better,
        unit=first.unit,
        n=first.n,
        interval=(round(low, 6), round(high, 6)),
        data=result.data,
        data_sha256=result.data_sha256,
    )


def embedding_bytes(manifest: Manifest) -> int | None:
    """Return the size of one embedding; None if the variant returns none of a fixed size."""
    spec = next((spec for spec in manifest.outputs if spec.name == "embedding"), None)
    axes = spec.axes.split()[1:] if spec else []
    if spec is None or not all(axis.isdigit() for axis in axes):
        return None
    return math.prod(map(int, axes)) * np.dtype(spec.dtype).itemsize
