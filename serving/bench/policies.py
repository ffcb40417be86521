# SPDX-License-Identifier: Apache-2.0
"""The figures of measured policies, in process and through a router."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.exporter.artefact.frontier import (
    ROUNDS,
    FrontierEntry,
    PolicyEntry,
    PolicyStep,
    Ratio,
)
from saccade.exporter.policy.policy import PolicyFile
from saccade.models.scores.results import (
    EvaluationResult,
    paired_bootstrap,
    paired_log_ratio,
    wilson,
)
from saccade.serving.bench.figures import clients_of
from saccade.serving.bench.in_process import InProcessLoad
from saccade.serving.bench.measurement import Measurement, grpc_of, measured_score, raw_samples
from saccade.serving.bench.policy_works import Answered, PolicyWork, PolicyWorks, ends_of
from saccade.serving.bench.served import FULL, Windows, windows_of
from saccade.serving.bench.work import Key


def measured_policy(
    work: PolicyWork,
    policies: PolicyWorks,
    measured: Sequence[Measurement],
    entries: Sequence[FrontierEntry],
    inside: Mapping[Key, InProcessLoad],
    windows: Windows,
) -> tuple[PolicyEntry, dict[str, Any]]:
    """Return a policy's entry in the frontier, and its raw samples."""
    assert policies.answered is not None
    ((full, result),) = [
        (entry, one.result)
        for one, entry in zip(measured, entries, strict=True)
        if entry.variant == work.content.full
    ]
    own, full_alone = windows_of(windows, work.title), windows_of(windows, FULL)
    samples = raw_samples(inside[work.key], own)
    if full_alone:
        samples["full_grpc"] = raw_samples(inside[work.key], full_alone)["grpc"]
    entry = entry_of_policy(work, policies.answered, result, inside, full)
    return with_served(entry, grpc_of(own), grpc_of(full_alone) or full.grpc or {}), samples


def entry_of_policy(
    work: PolicyWork,
    answered: Answered,
    result: EvaluationResult,
    measured: Mapping[tuple[str, str], InProcessLoad],
    full: FrontierEntry,
) -> PolicyEntry:
    """Return the frontier's entry of a policy, with the measurements without a server.

    `full` and `result` are those of the full model, whose score's name it takes.
    """
    policy, content = work.policy, work.content
    ends = ends_of(work, answered)
    values = _chosen(ends, [answered.values(name) for name in work.variants])
    full_values = answered.values(content.full)
    alike = _chosen(ends, [answered.same(name, content) for name in work.variants])
    n, same = len(alike), int(alike.sum())
    inside = measured[work.key]
    return PolicyEntry(
        policy=policy.name,
        steps=tuple(
            PolicyStep(
                step.variant, step.sha256, step.threshold, round(float((ends == at).mean()), 6)
            )
            for at, step in enumerate(policy.steps)
        ),
        full=content.full,
        full_sha256=next(one.sha256 for one in content.variants if one.variant == content.full),
        against=content.against,
        confidence=content.confidence,
        risk=policy.risk,
        bound=policy.bound,
        runtime=full.runtime,
        device=full.device,
        ops=full.ops,
        score=measured_score(result, float(values.mean()), len(values), answered.interval(values)),
        gain=round(float(values.mean() - full_values.mean()), 6),
        gain_interval=_rounded(paired_bootstrap(values, full_values)),
        agreement=round(same / n, 6),
        agreement_interval=_rounded(wilson(same, n)),
        calibrated=_is_calibrated_on(content, answered),
        in_process=inside.summary(),
        grpc=None,
        times_full=_over(inside, measured[content.full, ""]),
        times_full_served=None,
        min_ari=content.min_ari,
    )


def _chosen(ends: np.ndarray, by_step: Sequence[np.ndarray]) -> np.ndarray:
    """Return of each sample the value of the step at which it ends.

    Shapes: ends [n], by_step one [n] per step -> [n].
    """
    return np.take_along_axis(np.stack(by_step), ends[None], axis=0)[0]


def with_served(
    entry: PolicyEntry, own: Mapping[str, Any] | None, full: Mapping[str, Any]
) -> PolicyEntry:
    """Return the entry with its points through the router, and with their ratio to the full model.

    `full` are the points of the full model in the same server.
    """
    if own is None:
        return entry
    most = max(own, key=clients_of)
    times = ratio(own[most][ROUNDS], full[most][ROUNDS])
    return replace(entry, grpc=dict(own), times_full_served=times)


def ratio(rates: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return how many times one throughput is the other, by rounds that measured both in turn."""
    low, high = np.exp(paired_log_ratio(rates, others))
    times = float(np.exp(np.mean(np.log(np.array(rates) / np.array(others)))))
    interval = (round(float(low), 4), round(float(high), 4)) if np.isfinite(high) else None
    return Ratio(round(times, 4), interval)


def _over(policy: InProcessLoad, full: InProcessLoad) -> Ratio:
    return ratio(policy.calls[policy.best_batch].rounds, full.calls[full.best_batch].rounds)


def _is_calibrated_on(content: PolicyFile, answered: Answered) -> bool:
    """Return whether the test samples are among those that chose the chains or certified them."""
    calibrated = (
        (content.split, content.data, content.data_sha256),
        (content.choose_split, content.choose_data, content.choose_data_sha256),
    )
    return any(
        answered.data == data
        if split in ("all", *answered.within)  # their hash is of more samples than these
        else answered.data_sha256 == sha256
        for split, data, sha256 in calibrated
    )


def _rounded(interval: tuple[float, float]) -> tuple[float, float]:
    return round(interval[0], 6), round(interval[1], 6)
