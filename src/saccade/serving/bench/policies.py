# SPDX-License-Identifier: Apache-2.0
"""Certified policies in a benchmark: run as the router runs them, in turn with the variants."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import (
    ROUNDS,
    PolicyEntry,
    PolicyStep,
    Ratio,
    Score,
)
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.decisions import Decide
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.tasks import task_asked, tasks_of
from saccade.exporter.policy.certificate import check_certificates
from saccade.exporter.policy.policy import (
    SUFFIX,
    Policy,
    PolicyFile,
    policy_files,
    read_policies,
)
from saccade.exporter.runtimes.runtime import Runtime
from saccade.machine import Machine
from saccade.model_repository.router.choose import compared
from saccade.model_repository.router.confidence import confidence
from saccade.models.entry import EvaluationTask, imported
from saccade.models.interface import Arrays
from saccade.models.scores.intervals import paired_bootstrap, paired_log_ratio, wilson
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import InProcess
from saccade.serving.client.zero_shot import Labelling
from saccade.serving.repository.policies import ServedPolicy, labels_problem, served_policy
from saccade.verbosity import note

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

    `labelling` are the labels that a router needs to choose, if the model has no classes.
    Shapes: logits[variant] [n classes], labels [n].
    """

    logits: Mapping[str, np.ndarray]
    labels: np.ndarray
    data: str
    data_sha256: str
    labelling: Labelling | None = None


@dataclass(frozen=True)
class PolicyWorks:
    """The policies of a folder to measure, what their variants answer, and the policies left out.

    `left_out` are names of policies or of files, with the reason.
    """

    works: tuple[PolicyWork, ...] = ()
    answered: Answered | None = None
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ServedPolicies:
    """The policies to measure through a server, and what its router needs to follow them.

    `full_alone`: requests to the full model are measured again beside those of the policies,
    because they do not have the same outputs, or were sent to another server or not at all.
    """

    works: tuple[PolicyWork, ...] = ()
    followed: tuple[ServedPolicy, ...] = ()
    labelling: Labelling | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)  # of each variant
    full_alone: bool = False


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
            reason = _no_answers(first, named, task)
            left_out += [(name, reason) for name in found]
    if not decide:
        return PolicyWorks((), None, tuple(left_out))
    return _loaded(folder, found, left_out, models, imported(decide), options)


def _no_answers(model: EvaluatedModel, named: str, task: EvaluationTask) -> str:
    """Return why a task measures no policies, and what to do."""
    if task.segments:
        return (
            f"the task {named} compares segmentations, of which a benchmark of a folder measures "
            "no policies. Measure its speed with: saccade bench --url HOST:PORT"
        )
    every = tasks_of(model.family, model.components)
    others = [name for name, other in every.items() if other.decide]
    return (
        f"the task {named} does not score answers of one class each, among which a policy "
        f"chooses. Measure with --task {others[0] if others else 'of a classifier'}"
    )


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
            if not reason and content.runtime.partition(" ")[0] != runtime.name:
                reason = f"it was calibrated with {content.runtime}, not with {runtime.name}"
            yield policy.name, (policy, content), reason


def _loaded(
    folder: ArtefactFolder,
    found: Mapping[str, tuple[Policy, PolicyFile]],
    left_out: Sequence[tuple[str, str]],
    models: Sequence[EvaluatedModel],
    decide: Decide,
    options: EvaluateOptions,
) -> PolicyWorks:
    """Return the policies with what their variants answer, without those of other labels."""
    decider = decide(models[0], options, options.split or "test")
    if decider.labels is None:
        raise SaccadeError(f"{decider.data}: has no labels. Pass labeled data with --data.")
    labelling = Labelling(*decider.labelling) if decider.labelling else None
    if labelling:
        problems = {
            name: labels_problem(content, folder.path / f"{content.name}{SUFFIX}", labelling)
            for name, (_, content) in found.items()
        }
        left_out = (*left_out, *((name, reason) for name, reason in problems.items() if reason))
        found = {name: one for name, one in found.items() if not problems[name]}
    needed = {step.variant for policy, _ in found.values() for step in policy.steps}
    needed |= {content.full for _, content in found.values()}
    runs, logits = {}, {}
    for model in models:
        if model.name in needed:
            variant = decider.variant(model)
            runs[model.name], logits[model.name] = variant.run, variant.logits()
    order = np.random.default_rng(options.seed).permutation(len(decider.labels))[:_SAMPLES]
    inputs = {name: array[order] for name, array in decider.inputs.items()}
    works = tuple(
        PolicyWork(policy, content, tuple(runs[step.variant] for step in policy.steps), inputs)
        for policy, content in found.values()
    )
    answered = Answered(logits, decider.labels, decider.data, decider.data_sha256, labelling)
    return PolicyWorks(works, answered, tuple(left_out))


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
    """Return whether the test samples are among those that chose the chains or certified them."""
    calibrated = (
        (content.split, content.data, content.data_sha256),
        (content.choose_split, content.choose_data, content.choose_data_sha256),
    )
    return any(
        # The hash of `all` is of all splits together.
        answered.data == data if split == "all" else answered.data_sha256 == sha256
        for split, data, sha256 in calibrated
    )


def _rounded(interval: tuple[float, float]) -> tuple[float, float]:
    return round(interval[0], 6), round(interval[1], 6)
