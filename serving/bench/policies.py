# SPDX-License-Identifier: Apache-2.0
"""The figures of measured policies, in process and through a router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from saccade.core.machine import Machine
from saccade.core.verbosity import note
from saccade.exporter.artefact.frontier import (
    ROUNDS,
    MeasuredScore,
    PolicyEntry,
    PolicyStep,
    Ratio,
)
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.policy.policy import (
    PolicyFile,
)
from saccade.model_repository.router.choose import compared
from saccade.model_repository.router.routes import PolicyRoute
from saccade.models.scores.intervals import (
    paired_bootstrap,
    paired_log_ratio,
    wilson,
)
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import InProcessLoad
from saccade.serving.bench.policy_works import Answered, PolicyWork, PolicyWorks, ends_of
from saccade.serving.client.zero_shot import Labelling
from saccade.serving.repository.policies import served_policy


@dataclass(frozen=True)
class ServedPolicies:
    """The policies to measure through a server, and what its router needs to follow them.

    `full_alone`: requests to the full model are measured again beside those of the policies,
    because they do not have the same outputs, or were sent to another server or not at all.
    """

    works: tuple[PolicyWork, ...] = ()
    followed: tuple[PolicyRoute, ...] = ()
    labelling: Labelling | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)  # of each variant
    full_alone: bool = False


def entry_of_policy(
    work: PolicyWork,
    answered: Answered,
    result: EvaluationResult,
    measured: Mapping[tuple[str, str], InProcessLoad],
    machine: Machine,
    ops: Ops,
) -> PolicyEntry:
    """Return the frontier's entry of a policy, with the measurements without a server.

    `result` is that of the full model, whose score's name it takes.
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
        runtime=machine.runtime,
        device=machine.device,
        ops=ops,
        score=_score(result, values, answered),
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


def served_policies_of(works: PolicyWorks, variants: Sequence[VariantFiles]) -> ServedPolicies:
    """Return the policies that the router of one server can follow: all that are measured, or none.

    There is none, with a note, if they are compared with different full models.
    """
    if len(full := sorted({work.content.full for work in works.works})) > 1:
        note(
            f"Policies are measured in process only: they are compared with {' and '.join(full)}, "
            "and a router follows those of one full model. Calibrate again what is older."
        )
        return ServedPolicies()
    labelling = works.answered.labelling if works.answered else None
    precisions = {variant.name: variant.main.variant.precision for variant in variants}
    budgets = [compared(variant.main.variant.budget) for variant in variants]
    # Two precisions have a server each, and of two variants of one budget one is not measured.
    alike = len(set(precisions.values())) == 1 and len(set(budgets)) == len(budgets)
    return ServedPolicies(
        works.works,
        tuple(served_policy(work.content, work.policy) for work in works.works),
        labelling,
        precisions,
        full_alone=bool(works.works) and (bool(labelling) or not alike),
    )


def with_served(
    entry: PolicyEntry, points: Mapping[str, dict[str, Any]], full: Mapping[str, Any]
) -> PolicyEntry:
    """Return the entry with its points through the router, and with their ratio to the full model.

    `points` are by title; `full` are those of the full model in the same server.
    """
    own = points.get(f"policy {entry.policy}")
    if own is None:
        return entry
    most = max(own, key=lambda point: int(point.rpartition("_")[2]))
    times = ratio(own[most][ROUNDS], full[most][ROUNDS])
    return replace(entry, grpc=own, times_full_served=times)


def ratio(rates: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return how many times one throughput is the other, by rounds that measured both in turn."""
    low, high = np.exp(paired_log_ratio(rates, others))
    times = float(np.exp(np.mean(np.log(np.array(rates) / np.array(others)))))
    interval = (round(float(low), 4), round(float(high), 4)) if np.isfinite(high) else None
    return Ratio(round(times, 4), interval)


def _over(policy: InProcessLoad, full: InProcessLoad) -> Ratio:
    return ratio(policy.calls[policy.best_batch].rounds, full.calls[full.best_batch].rounds)


def _score(result: EvaluationResult, values: np.ndarray, answered: Answered) -> MeasuredScore:
    first = result.scores[0]
    return MeasuredScore(
        name=first.name,
        value=round(float(values.mean()), 6),
        higher_is_better=first.higher_is_better,
        unit=first.unit,
        n=len(values),
        interval=_rounded(answered.interval(values)),
        data=result.data,
        data_sha256=result.data_sha256,
    )


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
