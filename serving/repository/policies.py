# SPDX-License-Identifier: Apache-2.0
"""Policies of an artefact folder for the router: those that are still certified."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN, Positive, Probability, Range, typed
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.policy.answers import DECIDES
from saccade.exporter.policy.certificate import check_certificates
from saccade.exporter.policy.options import MOST_STEPS, Against
from saccade.exporter.policy.policy import (
    Measure,
    Policy,
    PolicyFile,
    Risk,
    policy_files,
    read_answers,
    read_policies,
    texts_sha256,
)
from saccade.serving.client.zero_shot import Labelling

KEY = "policies"  # key in routes.json and in the router's description for clients
CHOOSES = "logits"  # output of models that choose among classes, so variants can take turns
_AGAIN = "Write the repository again."


@dataclass(frozen=True)
class ServedStep:
    """One variant of a chain, and the confidence at which its answer is kept."""

    variant: str
    sha256: str
    threshold: float | None  # None: the last step, which always answers
    temperature: Positive


@dataclass(frozen=True)
class ServedPolicy:
    """A policy in routes.json.

    Units: risk and bound are shares of samples, seconds are per sample.
    """

    name: str
    against: Against
    confidence: Probability
    risk: Risk
    bound: Annotated[float, Range(-1, 1)]
    measure: Measure
    full: str  # the variant with which the chain was compared
    seconds: Positive
    steps: tuple[ServedStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    @property
    def variants(self) -> set[str]:
        """The variants that the repository must have."""
        return {self.full, *(step.variant for step in self.steps)}


def served_policies(
    folder: ArtefactFolder,
    variants: Sequence[VariantFiles],
    *,
    runtime: str,
    labelling: Labelling | None,
) -> tuple[ServedPolicy, ...]:
    """Return the policies of a folder that a router of these variants can follow.

    `labelling` are labels given at deployment. A policy that needs a variant which is not served,
    or that was calibrated with another runtime, is left out with a note: it is still valid, but
    not for this repository.

    Raises: SaccadeError if a certificate is not confirmed, the variants have changed, or policies
        contradict each other.
    """
    paths = policy_files(folder.path)
    if not paths:
        return ()
    for report in check_certificates(folder.path, folder.variants):
        if not report.passed:
            raise SaccadeError(_refusal(str(report.problem)))
    kept: dict[str, ServedPolicy] = {}
    for path in paths:
        content = read_policies(path)
        if labelling is not None:
            _check_labels(content, path, labelling.of(variants[0].runtime_metadata))
        for policy in _followable(content, path, variants, runtime, labelling is not None):
            if policy.name in kept:
                raise SaccadeError(
                    f"{path}: found policy {policy.name}, which another file of {folder} also "
                    "contains. Delete one of the files, or calibrate again with another --name."
                )
            kept[policy.name] = policy
    _check_full(folder, kept)
    return tuple(kept.values())


def policies_of(routes: Mapping[str, Any]) -> tuple[ServedPolicy, ...]:
    """Return the policies in routes.json.

    Raises: SaccadeError for a missing, unknown or wrong key.
    """
    try:
        found: tuple[ServedPolicy, ...] = typed(
            tuple[ServedPolicy, ...], routes.get(KEY, ()), f"{KEY}"
        )
    except SaccadeError as error:
        raise SaccadeError(str(error).replace(f"{AGAIN}", _AGAIN)) from error
    return found


def faults(policies: Sequence[ServedPolicy], hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with policies for variants of these hashes, one sentence each."""
    for name, count in _counts(policy.name for policy in policies).items():
        if count > 1:
            yield f"found {count} policies with the name {name}, expected one. {_AGAIN}"
    if len(full := {policy.full for policy in policies}) > 1:
        yield f"policies are compared with {' and '.join(sorted(full))}, expected one. {_AGAIN}"
    for policy in policies:
        for reason in _faults(policy, hashes):
            yield f"policy {policy.name}: {reason} {_AGAIN}"


def _faults(policy: ServedPolicy, hashes: Mapping[str, str]) -> Iterator[str]:
    if missing := sorted(policy.variants - set(hashes)):
        yield f"needs {missing[0]}, which is not in the repository."
    for step in policy.steps:
        if step.variant in hashes and hashes[step.variant] != step.sha256:
            yield (
                f"was certified with {step.variant} of SHA-256 {step.sha256[:12]}..., the "
                f"repository has {hashes[step.variant][:12]}...."
            )
    *early, last = [step.threshold for step in policy.steps] or [0.0]
    chain = [step.variant for step in policy.steps]
    if last is not None or None in early or len(set(chain)) < len(chain) or len(chain) > MOST_STEPS:
        yield "is not a chain: expected different variants, each but the last with a threshold."


def _refusal(problem: str) -> str:
    return f"{problem.rstrip('.')}. Or leave policies out with --no-policies."


def _followable(
    content: PolicyFile,
    path: Path,
    variants: Sequence[VariantFiles],
    runtime: str,
    labelled: bool,
) -> Iterator[ServedPolicy]:
    there = {variant.name for variant in variants}
    components = variants[0].components.values()
    decides = any(spec.name in DECIDES for part in components for spec in part.outputs)
    for policy in content.policies:
        served = served_policy(content, policy)
        reason = ""
        if content.runtime.partition(" ")[0] != runtime:
            reason = f"was calibrated with {content.runtime}, and the repository runs {runtime}"
        elif left_out := sorted(served.variants - there):
            reason = f"needs {left_out[0]}, which the repository leaves out"
        elif not (decides or labelled):
            reason = "needs logits, which a router has only with --labels"
        if reason:
            note(f"{path.name}: policy {policy.name} is left out: it {reason}")
        else:
            yield served


def served_policy(content: PolicyFile, policy: Policy) -> ServedPolicy:
    """Return a policy of a file as a router follows it."""
    return ServedPolicy(
        name=policy.name,
        against=content.against,
        confidence=content.confidence,
        risk=policy.risk,
        bound=policy.bound,
        measure=policy.measure,
        full=content.full,
        seconds=policy.seconds,
        steps=tuple(
            ServedStep(step.variant, step.sha256, step.threshold, step.temperature)
            for step in policy.steps
        ),
    )


def _check_labels(content: PolicyFile, path: Path, labelling: Labelling) -> None:
    """Check that the labels and templates of the deployment are those of the calibration.

    Raises: SaccadeError if they are not.
    """
    if problem := labels_problem(content, path, labelling):
        raise SaccadeError(
            f"{path}: {problem}. Pass the calibration's with --labels and --templates, calibrate "
            "again, or leave policies out with --no-policies."
        )


def labels_problem(content: PolicyFile, path: Path, labelling: Labelling) -> str:
    """Return how labels or templates differ from those of the calibration; empty if they do not."""
    labels = labelling.labels
    for kind, texts, expected in (
        ("labels", labels, content.labels_sha256),
        ("templates", labelling.templates, content.templates_sha256),
    ):
        if expected is not None and (found := texts_sha256(texts)) != expected:
            return (
                f"was calibrated with {kind} of SHA-256 {expected[:12]}..., found "
                f"{found[:12]}... ({len(texts)}: {', '.join(texts):.60})"
            )
    classes = int(read_answers(content, path).classes.max()) + 1
    if classes > len(labels):
        return f"was calibrated with {classes} labels or more, found {len(labels)}"
    return ""


def _check_full(folder: ArtefactFolder, policies: Mapping[str, ServedPolicy]) -> None:
    full = {policy.full: policy.name for policy in policies.values()}
    if len(full) > 1:
        pairs = ", ".join(f"{policy} with {variant}" for variant, policy in sorted(full.items()))
        raise SaccadeError(
            f"{folder}: policies are compared with different full models ({pairs}), expected one. "
            "Delete the older file, or calibrate again with: "
            f"saccade calibrate {folder} --data DATA"
        )


def _counts(names: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
