# SPDX-License-Identifier: Apache-2.0
"""Certified policies in a benchmark: run as the router runs them, in turn with the variants."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import (
    ROUNDS,
    Entry,
    PolicyEntry,
    PolicyStep,
    Ratio,
    Score,
)
from saccade.exporter.evaluation.decisions import Decide
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.tasks import task_asked
from saccade.exporter.policy.certificate import check_certificates
from saccade.exporter.policy.policy import Policy, PolicyFile, policy_files, read_policies
from saccade.exporter.runtimes.runtime import Runtime
from saccade.machine import Machine
from saccade.model_repository.router.confidence import confidence
from saccade.models.entry import imported
from saccade.models.interface import Arrays, TensorSpec
from saccade.models.scores.intervals import paired_bootstrap, paired_log_ratio, wilson
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import InProcess
from saccade.serving.repository.policies import CHOOSES

_SAMPLES = 1024  # to measure speed with, in a random order


@dataclass(frozen=True)
class PolicyWork:
    """A policy as a function of inputs: rows that are sure leave, the others continue.

    Shapes: inputs [n ...]; `runs` maps rows of inputs to logits [rows classes], one per step.
    """

    policy: Policy
    content: PolicyFile
    runs: tuple[Callable[[Arrays], np.ndarray], ...] = field(repr=False)
    inputs: Arrays = field(repr=False)
    varied: bool = True  # rows differ in how many variants they need

    @property
    def key(self) -> tuple[str, str]:
        """Its key among variants and roles; the space in it keeps it apart from theirs."""
        return self.title, ""

    @property
    def title(self) -> str:
        """Title for messages."""
        return f"policy {self.policy.name}"

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of its steps."""
        return tuple(step.variant for step in self.policy.steps)

    def is_sure(self, step: int, logits: np.ndarray) -> np.ndarray:
        """Return whether a step's answer is final.

        Shapes: logits [n classes] -> bool [n].
        """
        chosen = self.policy.steps[step]
        if chosen.threshold is None:
            return np.ones(len(logits), bool)
        sure = confidence(self.policy.measure, logits, chosen.temperature)
        return np.asarray(sure >= chosen.threshold)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Answer a batch with no more work than each row needs.

        Shapes: inputs [b ...] -> `class` [b], and `step` [b], from 0.
        """
        count = len(next(iter(inputs.values())))
        classes, steps, rows = (
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.arange(count),
        )
        for step, run in enumerate(self.runs):
            some = len(rows) < count
            logits = run({name: array[rows] if some else array for name, array in inputs.items()})
            classes[rows], steps[rows] = logits.argmax(-1), step
            rows = rows[~self.is_sure(step, logits)]
            if not len(rows):
                break
        return {"class": classes, "step": steps}

    def steps_of(self, logits: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the step at which each sample ends, from the logits of all variants.

        Shapes: logits[variant] [n classes] -> [n], from 0.
        """
        ends = np.full(len(logits[self.variants[0]]), len(self.variants) - 1)
        for step in reversed(range(len(self.variants) - 1)):
            ends[self.is_sure(step, logits[self.variants[step]])] = step
        return ends


@dataclass(frozen=True)
class Answered:
    """The logits of variants on all test samples.

    Shapes: logits[variant] [n classes], labels [n].
    """

    logits: Mapping[str, np.ndarray]
    labels: np.ndarray
    data: str
    data_sha256: str


@dataclass(frozen=True)
class PolicyWorks:
    """The policies of a folder to measure, what their variants answer, and the policies left out.

    `left_out` are names of policies or of files, with the reason.
    """

    works: tuple[PolicyWork, ...] = ()
    answered: Answered | None = None
    left_out: tuple[tuple[str, str], ...] = ()


def policy_works(
    folder: ArtefactFolder,
    models: Sequence[EvaluatedModel],
    runtime: Runtime,
    options: EvaluateOptions,
) -> PolicyWorks:
    """Return the policies of a folder that can be measured now.

    A policy whose certificate is not confirmed, or whose variants have changed, is left out with
    the reason: a folder is measured before it is calibrated again.

    Raises: SaccadeError if the data does not fit.
    """
    if not policy_files(folder.path):
        return PolicyWorks()
    require("scipy.stats", extra="bench")
    found: dict[str, tuple[Policy, PolicyFile]] = {}
    left_out = []
    for name, policy, reason in _examined(folder, runtime):
        if policy is None or reason or name in found:
            left_out.append((name, reason or "another file has a policy of the same name"))
        else:
            found[name] = policy
    decide = ""
    if found:
        first = models[0]
        named, task = task_asked(first.family, options.task, first.name, first.components)
        decide = task.decide
        if not decide:
            left_out += [(name, f"the task {named} has no answers of one class") for name in found]
    if not decide:
        return PolicyWorks((), None, tuple(left_out))
    works, answered = _loaded(tuple(found.values()), models, imported(decide), options)
    return PolicyWorks(works, answered, tuple(left_out))


def _examined(
    folder: ArtefactFolder, runtime: Runtime
) -> Iterator[tuple[str, tuple[Policy, PolicyFile] | None, str]]:
    """Yield each policy, or file, with the reason for leaving it out; empty if there is none."""
    reports = check_certificates(folder.path, folder.variants)
    problems = {report.name: report.problem for report in reports}
    for path in policy_files(folder.path):
        if problem := problems.get(path.name):  # of the whole file
            yield path.name, None, problem
            continue
        content = read_policies(path)
        for policy in content.policies:
            reason = problems[policy.name] or ""
            if not reason and content.runtime.split()[0] != runtime.name:
                reason = f"it was calibrated with {content.runtime}, not with {runtime.name}"
            yield policy.name, (policy, content), reason


def _loaded(
    found: Sequence[tuple[Policy, PolicyFile]],
    models: Sequence[EvaluatedModel],
    decide: Decide,
    options: EvaluateOptions,
) -> tuple[tuple[PolicyWork, ...], Answered]:
    needed = {step.variant for policy, _ in found for step in policy.steps}
    needed |= {content.full for _, content in found}
    runs, logits = {}, {}
    chosen = [model for model in models if model.name in needed]
    decider = decide(chosen[0], options, options.split or "test")
    for model in chosen:
        decider = decider.variant(model)
        runs[model.name], logits[model.name] = decider.run, decider.logits()
    order = np.random.default_rng(options.seed).permutation(len(logits[found[0][1].full]))
    inputs = {name: array[order[:_SAMPLES]] for name, array in decider.inputs.items()}
    works = tuple(
        PolicyWork(policy, content, tuple(runs[step.variant] for step in policy.steps), inputs)
        for policy, content in found
    )
    if decider.labels is None:
        raise SaccadeError(f"{decider.data}: has no labels. Pass labeled data with --data.")
    return works, Answered(logits, decider.labels, decider.data, decider.data_sha256)


def entry_of_policy(
    work: PolicyWork,
    answered: Answered,
    result: EvaluationResult,
    measured: Mapping[tuple[str, str], InProcess],
    machine: Machine,
    ops: Ops,
) -> PolicyEntry:
    """Return the frontier's entry of a policy, with the measurements without a server.

    `result` is that of the full model, whose score's name it takes.
    """
    policy, content = work.policy, work.content
    ends = work.steps_of(answered.logits)
    every = np.stack([answered.logits[name].argmax(-1) for name in work.variants])
    given = np.take_along_axis(every, ends[None], axis=0)[0]
    full = answered.logits[content.full].argmax(-1)
    right, full_right = (given == answered.labels) * 1.0, (full == answered.labels) * 1.0
    n, same = len(given), int((given == full).sum())
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
        score=_score(result, right, answered),
        gain=round(float(right.mean() - full_right.mean()), 6),
        gain_interval=_rounded(paired_bootstrap(right, full_right)),
        agreement=round(same / n, 6),
        agreement_interval=_rounded(wilson(same, n)),
        calibrated=_is_calibrated_on(content, answered),
        in_process=inside.summary(),
        grpc=None,
        times_full=_over(inside, measured[content.full, ""]),
        times_full_served=None,
    )


def served_works(
    policies: PolicyWorks, precisions: Collection[str], outputs: Sequence[TensorSpec]
) -> tuple[PolicyWork, ...]:
    """Return the policies that a server can follow, all or none.

    There is none if one was left out, because no repository could be written; if the variants of
    several precisions have servers of their own; or if only a router with labels could decide.
    `outputs` are those of the variants.
    """
    decides = any(spec.name == CHOOSES for spec in outputs)
    if policies.left_out or not decides or len(precisions) > 1:
        return ()
    return policies.works


def with_served(
    entry: PolicyEntry, points: Mapping[str, dict[str, Any]], full: Entry
) -> PolicyEntry:
    """Return the entry with its points through the router, and with their ratio to the full model.

    `points` are by title; the full model may have none, if a faster variant has the same budget.
    """
    own = points.get(f"policy {entry.policy}")
    if own is None:
        return entry
    most = max(own, key=lambda point: int(point.rpartition("_")[2]))
    others = (full.grpc or {}).get(most)
    times = ratio(own[most][ROUNDS], others[ROUNDS]) if others else None
    return replace(entry, grpc=own, times_full_served=times)


def ratio(rates: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return how many times one throughput is the other, by rounds that measured both in turn."""
    low, high = np.exp(paired_log_ratio(rates, others))
    times = float(np.exp(np.mean(np.log(np.array(rates) / np.array(others)))))
    interval = (round(float(low), 4), round(float(high), 4)) if np.isfinite(high) else None
    return Ratio(round(times, 4), interval)


def _over(policy: InProcess, full: InProcess) -> Ratio:
    return ratio(policy.calls[policy.best_batch].rounds, full.calls[full.best_batch].rounds)


def _score(result: EvaluationResult, right: np.ndarray, answered: Answered) -> Score:
    interval = _rounded(wilson(int(right.sum()), len(right)))
    return Score(
        name=result.scores[0].name,
        value=round(float(right.mean()), 6),
        higher_is_better=True,
        unit=result.scores[0].unit,
        n=len(right),
        interval=interval,
        data=answered.data,
        data_sha256=answered.data_sha256,
    )


def _is_calibrated_on(content: PolicyFile, answered: Answered) -> bool:
    """Return whether the test samples are among those of the calibration."""
    if content.split == "all":  # its hash is of all splits together
        return content.data == answered.data
    return content.data_sha256 == answered.data_sha256


def _rounded(interval: tuple[float, float]) -> tuple[float, float]:
    return round(interval[0], 6), round(interval[1], 6)
