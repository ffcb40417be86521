# SPDX-License-Identifier: Apache-2.0
"""Make a report's JSON object from the measurements of each variant."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from saccade.exporter.artefact.frontier import POLICIES, FrontierEntry, PolicyEntry
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.models.scores.results import EvaluationResult
from saccade.serving.bench import served
from saccade.serving.bench.in_process import InProcessLoad
from saccade.serving.bench.load import LoadResult, Stream
from saccade.serving.bench.options import MeasureOptions
from saccade.serving.bench.report import SCHEMA, VERSION
from saccade.serving.bench.scored import cost, further_scores

_REPORTED_OPTIONS = ("seconds", "rounds", "concurrency", "seed", "op_library")


@dataclass(frozen=True)
class Measurement:
    """The figures of one variant, and the raw values that they come from."""

    variant: VariantFiles
    result: EvaluationResult
    entry: FrontierEntry
    samples: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the variant's entry in a report."""
        return {
            **asdict(self.entry),
            **cost(self.variant),
            "scores": further_scores(self.result),
            "samples": self.samples,
        }


def content(measured: Sequence[Measurement], options: MeasureOptions) -> dict[str, Any]:
    """Return the content of report.json, without the machine and the server."""
    first = measured[0]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "model": first.variant.main.variant.model,
        "family": first.variant.main.variant.family,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": {
            "name": first.result.data,
            "sha256": first.result.data_sha256,
            "split": first.result.split,
            "n": len(first.result.samples),
        },
        "options": {key: getattr(options, key) for key in _REPORTED_OPTIONS},
        "variants": [measurement.to_dict() for measurement in measured],
    }


def raw_samples(
    result: EvaluationResult, inside: Mapping[tuple[str, str], InProcessLoad]
) -> dict[str, Any]:
    """Return the raw values of one variant that were measured without a server."""
    values = result.samples
    whole = np.array_equal(values, values.astype(int))
    samples: dict[str, Any] = {
        "values": [int(value) if whole else round(float(value), 6) for value in values],
        "grpc": {},
    }
    for (variant, role), figures in inside.items():
        if variant == result.variant:
            place = samples if not role else samples.setdefault(role, {"grpc": {}})
            place["in_process_s"] = calls_of(figures)
    return samples


def calls_of(figures: InProcessLoad) -> dict[str, list[float]]:
    """Return the seconds of each call, by batch size."""
    return {str(size): calls.seconds for size, calls in figures.calls.items()}


def policy_content(
    policies: Sequence[PolicyEntry],
    samples: Mapping[str, dict[str, Any]],
    left_out: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Return what report.json has on policies; nothing for a folder without policies."""
    content: dict[str, Any] = {}
    if policies:
        content[POLICIES] = [
            {**asdict(one), "samples": samples[f"policy {one.policy}"]} for one in policies
        ]
    if left_out:
        content["policies_left_out"] = [
            {"policy": name, "reason": reason} for name, reason in left_out
        ]
    return content


def add_served(
    samples: dict[str, Any], results: Mapping[served.Place, Sequence[LoadResult]]
) -> dict[str, Any]:
    """Return the `grpc` entry of one variant, and add the raw values to its samples.

    Each result contains one stream, the one of its place.
    """
    summaries: dict[str, Any] = {}
    for (_, role, point), rounds in results.items():
        into, raws = summaries, samples
        if role:
            into, raws = summaries.setdefault(role, {}), samples[role]
        (name,) = rounds[0].streams
        stream = Stream(name, "", 1, ())
        into[point] = served.point(stream, list(rounds))
        raws["grpc"][point] = [served.raw(stream, result) for result in rounds]
    return summaries
