# SPDX-License-Identifier: Apache-2.0
"""Certified policies to measure: run as the router runs them, with what their variants answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.decisions import Decide, Run, Segmenter, SegmentScored
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions, task_asked, tasks_of
from saccade.exporter.policy.answers import MEASURES
from saccade.exporter.policy.options import MIN_ARI
from saccade.exporter.policy.policy import (
    Policy,
    PolicyFile,
    check_certificates,
    policy_files,
    read_policies,
)
from saccade.exporter.runtimes.runtime import Runtime
from saccade.model_repository.router.choose import compared
from saccade.model_repository.router.confidence import DECIDES
from saccade.models.data.datasets import HELD_OUT
from saccade.models.entry import imported
from saccade.models.interface import Arrays
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.scores.results import Interval, bootstrap, wilson
from saccade.serving.client.texts import Labelling
from saccade.serving.repository.policies import (
    NO_POLICIES,
    RouterPolicies,
    labels_problem,
    router_policies,
)

LOGITS, MASKS = DECIDES  # outputs from which a policy decides
_SAMPLES = 1024  # to measure speed with, in a random order


@dataclass(frozen=True)
class FoundPolicy:
    """A policy, its file, and the path of that file."""

    policy: Policy
    content: PolicyFile
    path: Path


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
    decides: str = LOGITS  # the output of which the variants are sure or not
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
            rows = rows[sure < chosen.threshold]
            if not len(rows):
                break
        return {"class" if self.decides == LOGITS else self.decides: answers, "step": steps}


@dataclass(frozen=True)
class Classified:
    """The logits of variants on all test samples.

    `labelling` are the labels that a router needs to choose, if the model has no classes.
    Shapes: logits[variant] [n classes], labels [n].
    """

    logits: Mapping[str, np.ndarray]
    labels: np.ndarray
    data: str
    data_sha256: str
    labelling: Labelling | None = None
    within: tuple[str, ...] = ()  # as of `Segmenter`

    def sure(self, variant: str, measure: str, temperature: float) -> np.ndarray:
        """Return a variant's confidence in each answer.

        Shapes: -> [n].
        """
        return np.asarray(DECIDES[LOGITS](measure, self.logits[variant], temperature))

    def same(self, variant: str, content: PolicyFile) -> np.ndarray:
        """Return whether each answer is the full model's.

        Shapes: -> bool [n].
        """
        return np.asarray(self.logits[variant].argmax(-1) == self.logits[content.full].argmax(-1))

    def values(self, variant: str) -> np.ndarray:
        """Return the score of each answer.

        Shapes: -> [n].
        """
        return np.asarray((self.logits[variant].argmax(-1) == self.labels) * 1.0)

    @staticmethod
    def interval(values: np.ndarray) -> Interval:
        """Return the 95 % interval of a mean of scores."""
        return wilson(int(values.sum()), len(values))


@dataclass(frozen=True)
class Segmented:
    """The confidence of variants in their segmentations of all test samples, and their scores.

    `agreement` are the adjusted Rand indices with a full model's segmentations, which may be
    another one for each calibration; `within` is that of `Segmenter`.
    Shapes: confidence[variant] [measures n]; agreement[full, variant] and scores[variant] [n].
    """

    confidence: Mapping[str, np.ndarray]
    agreement: Mapping[tuple[str, str], np.ndarray]
    scores: Mapping[str, np.ndarray]
    data: str
    data_sha256: str
    within: tuple[str, ...]
    labelling: Labelling | None = None

    def sure(self, variant: str, measure: str, temperature: float) -> np.ndarray:
        """Return a variant's confidence in each segmentation, to which no temperature applies.

        Shapes: -> [n].
        """
        return np.asarray(self.confidence[variant][MEASURES.index(measure)])

    def same(self, variant: str, content: PolicyFile) -> np.ndarray:
        """Return whether each segmentation counts as the full model's.

        Shapes: -> bool [n].
        """
        return np.asarray(self.agreement[content.full, variant] >= (content.min_ari or MIN_ARI))

    def values(self, variant: str) -> np.ndarray:
        """Return the score of each segmentation.

        Shapes: -> [n].
        """
        return self.scores[variant]

    @staticmethod
    def interval(values: np.ndarray) -> Interval:
        """Return the 95 % interval of a mean of scores."""
        return bootstrap(values)


Answered = Classified | Segmented


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
    scores: Mapping[str, np.ndarray],
) -> PolicyWorks:
    """Return the policies of a folder that can be measured now.

    `scores` are those of each sample, by variant. A policy whose certificate is not confirmed, or
    whose variants have changed, is left out with the reason: a folder is measured before it is
    calibrated again.

    Raises: SaccadeError if the data does not fit.
    """
    if not (files := policy_files(folder.path)):
        return PolicyWorks()
    require("scipy.stats", extra="bench")
    reports = check_certificates(folder.path, folder.variants)
    problems = {report.name: report.problem for report in reports}
    found: dict[str, FoundPolicy] = {}
    left_out = []
    for path in files:
        if problem := problems.get(path.name):  # of the whole file
            left_out.append((path.name, problem))
            continue
        content = read_policies(path)
        for policy in content.policies:
            reason = problems[policy.name] or ""
            if not reason and content.runtime.partition(" ")[0] != runtime.name:
                reason = f"it was calibrated with {content.runtime}, not with {runtime.name}"
            if not reason and policy.name in found:
                reason = "another file has a policy of the same name"
            if reason:
                left_out.append((policy.name, reason))
            else:
                found[policy.name] = FoundPolicy(policy, content, path)
    if not found:
        return PolicyWorks((), None, tuple(left_out))
    first = models[0]
    named, task = task_asked(first.family, options.task, first.name, first.components)
    if task.decide:
        return _classified(found, left_out, models, imported(task.decide), options)
    if task.scored_segments:
        segment: SegmentScored = imported(task.scored_segments)
        works, answered = _segmented(found, models, segment(first, options), scores, options.seed)
        return PolicyWorks(works, answered, tuple(left_out))
    every = tasks_of(first.family, first.components)
    others = [name for name, other in every.items() if other.decide]
    reason = (
        f"the task {named} does not score answers of one class each, among which a policy "
        f"chooses. Measure with --task {others[0] if others else 'of a classifier'}"
    )
    return PolicyWorks((), None, (*left_out, *((name, reason) for name in found)))


def _classified(
    found: Mapping[str, FoundPolicy],
    left_out: Sequence[tuple[str, str]],
    models: Sequence[EvaluatedModel],
    decide: Decide,
    options: EvaluateOptions,
) -> PolicyWorks:
    """Return the policies with what their variants answer, without those of other labels."""
    decider = decide(models[0], options, options.split or HELD_OUT)
    if decider.labels is None:
        raise SaccadeError(f"{decider.name}: has no labels. Pass labeled data with --data.")
    labelling = Labelling(*decider.labelling) if decider.labelling else None
    if labelling:
        problems = {
            name: labels_problem(one.content, one.path, labelling) for name, one in found.items()
        }
        left_out = (*left_out, *((name, reason) for name, reason in problems.items() if reason))
        found = {name: one for name, one in found.items() if not problems[name]}
    runs, logits = {}, {}
    for model in _needed(found, models):
        variant = decider.variant(model)
        runs[model.name], logits[model.name] = variant.run, variant.logits()
    rows = _drawn(len(decider.labels), options.seed)
    inputs = {name: array[rows] for name, array in decider.inputs.items()}
    answered = Classified(logits, decider.labels, decider.name, decider.sha256, labelling)
    return PolicyWorks(_works(found, runs, inputs, LOGITS), answered, tuple(left_out))


def _segmented(
    found: Mapping[str, FoundPolicy],
    models: Sequence[EvaluatedModel],
    scored: Segmenter,
    scores: Mapping[str, np.ndarray],
    seed: int,
) -> tuple[tuple[PolicyWork, ...], Segmented]:
    """Return the policies with the segmentations of their variants."""
    full = {one.content.full for one in found.values()}
    owners, confidence = {}, {}
    agreement: dict[tuple[str, str], np.ndarray] = {}
    needed = _needed(found, models)
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
        for one in full
        for other in full
    }
    runs = {model.name: scored.of(model) for model in needed}
    inputs = scored.inputs(_drawn(len(scored.images), seed))
    answered = Segmented(
        confidence, agreement, scores, scored.data, scored.data_sha256, scored.within
    )
    return _works(found, runs, inputs, MASKS), answered


def _needed(
    found: Mapping[str, FoundPolicy], models: Sequence[EvaluatedModel]
) -> list[EvaluatedModel]:
    """Return the variants of these policies, and those that they are compared with."""
    names = {step.variant for one in found.values() for step in one.policy.steps}
    names |= {one.content.full for one in found.values()}
    return [model for model in models if model.name in names]


def _drawn(count: int, seed: int) -> np.ndarray:
    """Return the samples to measure speed with."""
    return np.random.default_rng(seed).permutation(count)[:_SAMPLES]


def _works(
    found: Mapping[str, FoundPolicy], runs: Mapping[str, Run], inputs: Arrays, decides: str
) -> tuple[PolicyWork, ...]:
    return tuple(
        PolicyWork(
            one.policy,
            one.content,
            tuple(runs[step.variant] for step in one.policy.steps),
            inputs,
            decides,
        )
        for one in found.values()
    )


def ends_of(work: PolicyWork, answered: Answered) -> np.ndarray:
    """Return the step at which each sample ends, from the confidence of all variants.

    Shapes: -> [n], from 0.
    """
    measure, (*early, _) = work.policy.measure, work.policy.steps
    ends = np.full(len(answered.values(work.variants[-1])), len(early))
    for at, step in reversed(list(enumerate(early))):
        ends[answered.sure(step.variant, measure, step.temperature) >= step.threshold] = at
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
    precisions: Mapping[str, str] = field(default_factory=dict)  # of each variant
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
    labelling = works.answered.labelling if works.answered else None
    precisions = {variant.name: variant.main.variant.precision for variant in variants}
    budgets = [compared(variant.main.variant.budget) for variant in variants]
    # Two precisions have a server each, and of two variants of one budget one is not measured.
    alike = len(set(precisions.values())) == 1 and len(set(budgets)) == len(budgets)
    return ServedPolicies(
        works.works,
        router_policies([(work.content, work.policy) for work in works.works]),
        labelling,
        precisions,
        full_alone=bool(works.works) and (bool(labelling) or not alike),
    )
