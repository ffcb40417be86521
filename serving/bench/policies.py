# SPDX-License-Identifier: Apache-2.0
"""Certified policies in a benchmark: run as the router runs them, and compared with the full model.

What their variants answer on all test samples is known, so only speeds are measured of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import (
    ROUNDS,
    FrontierEntry,
    PolicyEntry,
    PolicyStep,
)
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.decisions import Decide, Deciders, Run, Segmenter, SegmentScored
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions, task_asked, tasks_of
from saccade.exporter.policy.answers import MEASURES, stops
from saccade.exporter.policy.options import MIN_ARI
from saccade.exporter.policy.policy import (
    SUFFIX,
    Policy,
    PolicyFile,
    check_certificates,
    policy_files,
)
from saccade.exporter.runtimes.runtime import Runtime
from saccade.model_repository.router.choose import compared
from saccade.model_repository.router.confidence import DECIDES
from saccade.models.data.datasets import HELD_OUT
from saccade.models.entry import imported
from saccade.models.interface import Arrays
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.results import (
    EvaluationResult,
    Interval,
    bootstrap,
    paired_bootstrap,
    wilson,
)
from saccade.serving.bench.figures import clients_of
from saccade.serving.bench.in_process import InProcessLoad, timed_rows
from saccade.serving.bench.measurement import (
    Measurement,
    Windows,
    grpc_of,
    measured_score,
    ratio,
    raw_samples,
    windows_of,
)
from saccade.serving.bench.work import Key
from saccade.serving.client.texts import Labelling
from saccade.serving.repository.policies import (
    NO_POLICIES,
    RouterPolicies,
    labels_problem,
    router_policies,
)

LOGITS, MASKS, _ = DECIDES  # outputs from which a policy decides
FULL = "full model"  # the key of its streams among those of policies, like no variant's name
_Runs = Mapping[str, Run]  # by variant
_Policies = Mapping[str, tuple[Policy, PolicyFile]]  # of a folder by name, each with its file


@dataclass(frozen=True)
class PolicyWork:
    """A policy as a function of inputs: rows that are sure leave, the others continue.

    Shapes: inputs [n ...]; `runs` map rows of inputs to the output that decides, one per step:
            logits [rows classes] or masks [rows k h w].
    """

    policy: Policy
    content: PolicyFile
    runs: tuple[Callable[[Arrays], np.ndarray], ...] = field(repr=False)
    inputs: Arrays = field(repr=False)
    sent: Arrays = field(repr=False)  # what a caller sends a router instead
    served: tuple[Run, ...] = field(repr=False)  # of `sent`, as `runs` are of inputs
    decides: str = LOGITS  # the output of which the variants are sure or not
    varied: bool = True  # rows differ in how many variants they need

    @property
    def key(self) -> Key:
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

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Answer a batch with no more work than each row needs.

        Shapes: inputs [b ...] -> `class` [b] or `masks` [b k h w], and `step` [b], from 0.
        """
        count = len(next(iter(inputs.values())))
        answers, steps, rows = np.empty(0), np.zeros(count, np.int64), np.arange(count)
        for step, run in enumerate(self.runs):
            some = len(rows) < count
            found = run({name: array[rows] if some else array for name, array in inputs.items()})
            given = found.argmax(-1) if self.decides == LOGITS else found
            if step == 0:
                answers = given
            else:
                answers[rows], steps[rows] = given, step
            chosen = self.policy.steps[step]
            if chosen.threshold is None:
                break
            sure = DECIDES[self.decides](self.policy.measure, found, chosen.temperature)
            rows = rows[~stops(sure, chosen.threshold, given, self.policy.early)]
            if not len(rows):
                break
        return {"class" if self.decides == LOGITS else self.decides: answers, "step": steps}


@dataclass(frozen=True)
class PolicyAnswers:
    """What variants answer on all test samples.

    `confidence` is that of a variant by a measure at a temperature; `agreement` is that with a full
    model: of classes 0 or 1, of segmentations the adjusted Rand index. `interval` is the 95 %
    interval of a mean of values. `labelling` are the labels that a router needs to choose, if the
    model has no classes.

    Shapes: values[variant] [n], the score of each answer; agreement[full, variant] [n]; confidence
        returns [n]; classes[variant] [n].
    """

    values: Mapping[str, np.ndarray]
    confidence: Callable[[str, str, float], np.ndarray]
    agreement: Mapping[tuple[str, str], np.ndarray]
    interval: Callable[[np.ndarray], Interval]
    data: str
    data_sha256: str
    labelling: Labelling | None = None
    within: tuple[str, ...] = ()  # as of `Segmenter`
    classes: Mapping[str, np.ndarray] = field(default_factory=dict)

    def same(self, variant: str, content: PolicyFile) -> np.ndarray:
        """Return whether each answer counts as the full model's.

        Shapes: -> bool [n].
        """
        return self.agreement[content.full, variant] >= (content.min_ari or MIN_ARI)


def class_answers(
    logits: Mapping[str, np.ndarray],
    labels: np.ndarray,
    data: str,
    data_sha256: str,
    labelling: Labelling | None = None,
) -> PolicyAnswers:
    """Return the answers of classifiers.

    Shapes: logits[variant] [n classes], labels [n].
    """
    classes = {name: own.argmax(-1) for name, own in logits.items()}
    pairs = product(classes, repeat=2)
    return PolicyAnswers(
        {name: (own == labels) * 1.0 for name, own in classes.items()},
        lambda variant, measure, scale: DECIDES[LOGITS](measure, logits[variant], scale),
        {(one, other): (classes[one] == classes[other]) * 1.0 for one, other in pairs},
        lambda values: wilson(int(values.sum()), len(values)),
        data,
        data_sha256,
        labelling,
        classes=classes,
    )


@dataclass(frozen=True)
class PolicyWorks:
    """The policies of a folder to measure, what their variants answer, and the policies left out.

    `left_out` are names of policies or of files, with the reason.
    """

    works: tuple[PolicyWork, ...] = ()
    answers: PolicyAnswers | None = None
    left_out: tuple[tuple[str, str], ...] = ()


def policy_works(
    folder: ArtefactFolder,
    models: Sequence[EvaluatedModel],
    runtime: Runtime,
    options: EvaluateOptions,
    scores: Mapping[str, np.ndarray],
) -> PolicyWorks:
    """Return the policies of a folder that can be measured now.

    `scores` are those of each sample, by variant. A policy whose certificate is not confirmed, or
    whose variants have changed, is left out with the reason: a folder is measured before it is
    calibrated again.

    Raises: SaccadeError if the data does not fit.
    """
    if not policy_files(folder.path):
        return PolicyWorks()
    require("scipy.stats", extra="bench")
    policies: dict[str, tuple[Policy, PolicyFile]] = {}
    left_out = []
    for report in check_certificates(folder.path, folder.variants):
        policy, content, reason = report.policy, report.file, report.problem or ""
        if policy is None or content is None or reason:
            pass
        elif content.runtime.partition(" ")[0] != runtime.name:
            reason = f"it was calibrated with {content.runtime}, not with {runtime.name}"
        elif content.embeds:
            reason = "it is for embeddings, of which only variants are measured"
        elif report.name in policies:
            reason = "another file has a policy of the same name"
        else:
            policies[report.name] = policy, content
        if reason:
            left_out.append((report.name, reason))
    if not policies:
        return PolicyWorks(left_out=tuple(left_out))
    first = models[0]
    named, task = task_asked(first.family, options.task, first.name, first.components)
    if task.decide:
        decide: Decide = imported(task.decide)
        works = _works_of_classifiers(folder, policies, models, decide, options)
    elif task.scored_segments:
        segment: SegmentScored = imported(task.scored_segments)
        works = works_of_segmenters(policies, models, segment(first, options), scores, options.seed)
    else:
        every = tasks_of(first.family, first.components)
        others = [name for name, other in every.items() if other.decide]
        reason = (
            f"the task {named} does not score answers of one class each, among which a policy "
            f"chooses. Measure with --task {others[0] if others else 'of a classifier'}"
        )
        works = PolicyWorks(left_out=tuple((name, reason) for name in policies))
    return replace(works, left_out=(*left_out, *works.left_out))


def _works_of_classifiers(
    folder: ArtefactFolder,
    policies: _Policies,
    models: Sequence[EvaluatedModel],
    decide: Decide,
    options: EvaluateOptions,
) -> PolicyWorks:
    """Return the policies with what their variants answer, without those of other labels."""
    deciders = Deciders(decide, options, options.split or HELD_OUT)
    decider = deciders.of(models[0])
    if decider.labels is None:
        raise SaccadeError(f"{decider.name}: has no labels. Pass labeled data with --data.")
    labelling = Labelling(*decider.labelling) if decider.labelling else None
    left_out = {}
    for name, (_, content) in policies.items():
        path = folder.path / f"{content.name}{SUFFIX}"
        if labelling and (problem := labels_problem(content, path, labelling)):
            left_out[name] = problem
    policies = {name: one for name, one in policies.items() if name not in left_out}
    rows, needed = timed_rows(len(decider.labels), options.seed), _needed(policies, models)
    logits = {model.name: deciders.of(model).logits() for model in needed}
    runs = {model.name: deciders.on_rows(model, rows) for model in needed}
    served = {model.name: deciders.on_files(model) for model in needed}
    sent = {name: array[rows] for name, array in decider.inputs.items()}
    answers = class_answers(logits, decider.labels, decider.name, decider.sha256, labelling)
    works = _works(policies, runs, {"row": np.arange(len(rows))}, LOGITS, sent, served)
    return PolicyWorks(works, answers, tuple(left_out.items()))


def works_of_segmenters(
    policies: _Policies,
    models: Sequence[EvaluatedModel],
    scored: Segmenter,
    scores: Mapping[str, np.ndarray],
    seed: int,
) -> PolicyWorks:
    """Return the policies with the segmentations of their variants.

    Each calibration may compare with another full model.
    """
    full = {content.full for _, content in policies.values()}
    owners, confidence = {}, {}
    agreement: dict[tuple[str, str], np.ndarray] = {}
    needed = _needed(policies, models)
    for model in sorted(needed, key=lambda model: model.name not in full):
        segments = scored.segments(model)
        confidence[model.name] = segments.confidence
        if model.name in full:  # segmentations of all variants may need much memory
            owners[model.name] = segments.owners
        agreement |= {
            (name, model.name): adjusted_rand_index(of_full, segments.owners)
            for name, of_full in owners.items()
        }
    agreement |= {
        (one, other): adjusted_rand_index(owners[one], owners[other])
        for one, other in product(full, repeat=2)
    }
    answers = PolicyAnswers(
        scores,
        lambda variant, measure, _: confidence[variant][MEASURES.index(measure)],
        agreement,
        bootstrap,
        scored.data,
        scored.data_sha256,
        within=scored.within,
    )
    runs = {model.name: scored.of(model) for model in needed}
    inputs = scored.inputs(timed_rows(len(scored.images), seed))
    return PolicyWorks(_works(policies, runs, inputs, MASKS, inputs, runs), answers)


def _needed(policies: _Policies, models: Sequence[EvaluatedModel]) -> list[EvaluatedModel]:
    """Return the variants of these policies, and those that they are compared with."""
    names = {step.variant for policy, _ in policies.values() for step in policy.steps}
    names |= {content.full for _, content in policies.values()}
    return [model for model in models if model.name in names]


def _works(
    policies: _Policies, runs: _Runs, inputs: Arrays, decides: str, sent: Arrays, served: _Runs
) -> tuple[PolicyWork, ...]:
    works = []
    for policy, content in policies.values():
        own, of_files = (tuple(of[step.variant] for step in policy.steps) for of in (runs, served))
        works.append(PolicyWork(policy, content, own, inputs, sent, of_files, decides))
    return tuple(works)


def ends_of(work: PolicyWork, answers: PolicyAnswers) -> np.ndarray:
    """Return the step at which each sample ends, from 0. Shapes: -> [n]."""
    measure, (*early, _) = work.policy.measure, work.policy.steps
    ends = np.full(len(answers.values[work.variants[-1]]), len(early))
    for at, step in reversed(list(enumerate(early))):
        sure = answers.confidence(step.variant, measure, step.temperature)
        given = answers.classes.get(step.variant, sure)
        ends[stops(sure, step.threshold, given, work.policy.early)] = at
    return ends


@dataclass(frozen=True)
class ServedPolicies:
    """The policies to measure through a server, and what its router needs to follow them.

    `full_alone`: requests to the full model are measured again beside those of the policies,
    because they do not have the same outputs, or were sent to another server or not at all.
    """

    works: tuple[PolicyWork, ...] = ()
    followed: RouterPolicies = NO_POLICIES
    labelling: Labelling | None = None
    full_alone: bool = False


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
    labelling = works.answers.labelling if works.answers else None
    entries = [variant.main.variant for variant in variants]
    # Two precisions have a server each, and of two variants of one budget one is not measured.
    alike = len({entry.precision for entry in entries}) == 1
    alike &= len({compared(entry.budget) for entry in entries}) == len(entries)
    return ServedPolicies(
        works.works,
        router_policies([(work.content, work.policy) for work in works.works]),
        labelling,
        full_alone=bool(works.works) and (bool(labelling) or not alike),
    )


def measured_policy(
    work: PolicyWork,
    answers: PolicyAnswers,
    measured: Sequence[Measurement],
    inside: Mapping[Key, InProcessLoad],
    windows: Windows,
) -> tuple[PolicyEntry, dict[str, Any]]:
    """Return a policy's entry in the frontier, and its raw samples."""
    (full,) = [one for one in measured if one.variant.name == work.content.full]
    own, full_alone = windows_of(windows, work.title), windows_of(windows, FULL)
    samples = raw_samples(inside[work.key], own)
    if full_alone:
        samples["full_grpc"] = raw_samples(inside[work.key], full_alone)["grpc"]
    entry = entry_of_policy(work, answers, full.result, inside, full.entry)
    through = grpc_of(full_alone) or full.entry.grpc or {}
    return with_served(entry, grpc_of(own), through), samples


def entry_of_policy(
    work: PolicyWork,
    answers: PolicyAnswers,
    result: EvaluationResult,
    measured: Mapping[Key, InProcessLoad],
    full: FrontierEntry,
) -> PolicyEntry:
    """Return the frontier's entry of a policy, with the measurements without a server.

    `full` and `result` are those of the full model, whose score's name it takes.
    """
    policy, content, ends = work.policy, work.content, ends_of(work, answers)

    def chosen(by_step: Sequence[np.ndarray]) -> np.ndarray:
        """Return of each sample the value of the step at which it ends."""
        return np.take_along_axis(np.stack(by_step), ends[None], axis=0)[0]

    values = chosen([answers.values[name] for name in work.variants])
    full_values = answers.values[content.full]
    alike = chosen([answers.same(name, content) for name in work.variants])
    n, same = len(alike), int(alike.sum())
    shares = [round(float((ends == at).mean()), 6) for at in range(len(policy.steps))]
    inside, alone = measured[work.key], measured[content.full, ""]
    return PolicyEntry(
        policy=policy.name,
        steps=tuple(
            PolicyStep(step.variant, step.sha256, step.threshold, share)
            for step, share in zip(policy.steps, shares, strict=True)
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
        score=measured_score(result, float(values.mean()), len(values), answers.interval(values)),
        gain=round(float(values.mean() - full_values.mean()), 6),
        gain_interval=_rounded(paired_bootstrap(values, full_values)),
        agreement=round(same / n, 6),
        agreement_interval=_rounded(wilson(same, n)),
        calibrated=_is_calibrated_on(content, answers),
        in_process=inside.summary(),
        grpc=None,
        times_full=ratio(inside.rounds, alone.rounds),
        times_full_served=None,
        min_ari=content.min_ari,
    )


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


def _is_calibrated_on(content: PolicyFile, answers: PolicyAnswers) -> bool:
    """Return whether the test samples are among those that chose the chains or certified them."""
    calibrated = (
        (content.split, content.data, content.data_sha256),
        (content.choose_split, content.choose_data, content.choose_data_sha256),
    )
    return any(
        answers.data == data
        if split in ("all", *answers.within)  # their hash is of more samples than these
        else answers.data_sha256 == sha256
        for split, data, sha256 in calibrated
    )


def _rounded(interval: tuple[float, float]) -> tuple[float, float]:
    return round(interval[0], 6), round(interval[1], 6)
