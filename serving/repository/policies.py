# SPDX-License-Identifier: Apache-2.0
"""Policies of an artefact folder for the router, and the load-adaptive choice among its answers.

Only policies that are still certified are served. Both are in routes.json, in the router's words.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.options import range_of
from saccade.core.schema import AGAIN, Range, typed
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.tasks import tasks_of
from saccade.exporter.policy.answers import DECIDES
from saccade.exporter.policy.options import MOST_STEPS
from saccade.exporter.policy.policy import (
    FALSE_ALARM,
    SUFFIX,
    CertificateReport,
    Policy,
    PolicyFile,
    calibrate_again,
    check_certificates,
    policy_files,
    read_answers,
    texts_sha256,
)
from saccade.model_repository.router.routes import (
    AdaptiveRules,
    MonitorLimit,
    MonitorRules,
    PolicyRoute,
    StepRoute,
)
from saccade.models.budget import Budget
from saccade.serving.client.texts import Labelling
from saccade.serving.repository.options import RepositoryOptions

KEY, ADAPTIVE = "policies", "adaptive"  # keys in routes.json and in the router's description
MONITOR = "monitor"  # key in routes.json
CHOOSES = "logits"  # output of models that choose among classes, so variants can take turns
_AGAIN = "Write the repository again."
_ROUNDED = 1e-3  # shares in a policy file have six digits
# Numbers of policies and of the load-adaptive choice, by the names of their fields.
_BOUNDS = {
    "confidence": Range(0, 1, above=True, below=True),
    "risk": Range(0, 1, below=True),
    "bound": Range(-1, 1),
    "seconds": Range(0, above=True),
    "temperature": Range(0, above=True),
    "slo_ms": range_of(RepositoryOptions, "slo_ms"),
    "floor_budget": Range(0, 1, above=True),
    "end_share": Range(0, 1),
    "share": Range(0, 1, above=True),
    "rate": Range(0, 1),
    "alpha": Range(0, 1, above=True, below=True),
}


class RouterPolicies(NamedTuple):
    """Policies that a router follows, and the shares of samples that end at each of their steps."""

    routes: tuple[PolicyRoute, ...] = ()
    shares: Mapping[str, tuple[float, ...]] = MappingProxyType({})  # in the calibration, by name
    limits: Mapping[str, MonitorLimit] = MappingProxyType({})  # of those that can be monitored
    spaces: Mapping[str, np.ndarray] = MappingProxyType({})  # arrays of the router's spaces


NO_POLICIES = RouterPolicies()


def served_policies(
    folder: ArtefactFolder,
    variants: Sequence[VariantFiles],
    *,
    runtime: str,
    labelling: Labelling | None,
) -> RouterPolicies:
    """Return the policies of a folder that a router of these variants can follow.

    `labelling` are labels given at deployment. A policy that needs a variant which is not served,
    or that was calibrated with another runtime, is left out with a note: it is still valid, but
    not for this repository.

    Raises: SaccadeError if a certificate is not confirmed, the variants have changed, or policies
        contradict each other.
    """
    if not policy_files(folder.path):
        return NO_POLICIES
    reports = check_certificates(folder.path, folder.variants)
    for report in reports:
        if not report.passed:
            raise SaccadeError(_refusal(str(report.problem)))
    if labelling is not None:
        labelled = {one.file.name: one.file for one in reports if one.file and not one.file.embeds}
        for file in labelled.values():
            path = folder.path / f"{file.name}{SUFFIX}"
            _check_labels(file, path, labelling.of(variants[0].runtime_metadata))
    kept = [
        (report.file, report.policy)
        for report in reports
        if report.file and report.policy
        if _is_followable(report.file, report.policy, variants, runtime, labelling is not None)
    ]
    followed = router_policies(kept)
    embed = {file.name: file for file, _ in kept if file.embeds}
    for reason in (*_contradictions(followed.routes), *_several_spaces(embed)):
        files = " and ".join(sorted({f"{file.name}{SUFFIX}" for file, _ in kept}))
        raise SaccadeError(
            f"{folder}: {reason} The policies are in {files}. Delete one of these files, or "
            f"calibrate with another --name. {calibrate_again(folder.path)}"
        )
    served = {variant.name for variant in variants}
    for name, file in embed.items():
        arrays = read_answers(file, folder.path / f"{name}{SUFFIX}").spaces
        unused = {one.name for one in file.maps or () if not {one.source, one.target} <= served}
        spaces = {name: array for name, array in arrays.items() if name not in unused}
        followed = followed._replace(spaces=spaces)
    limits = {one.name: _limit(one) for one in reports if one.file and not one.file.embeds}
    monitored = {one.name: limits[one.name] for one in followed.routes if one.name in limits}
    return followed._replace(limits=monitored)


def _several_spaces(files: Collection[str]) -> Iterator[str]:
    if len(files) > 1:
        yield f"{len(files)} calibrations are of embeddings, each with maps of its own, expected 1."


def router_policies(policies: Sequence[tuple[PolicyFile, Policy]]) -> RouterPolicies:
    """Return policies, each with the content of its file, as a router follows them."""
    return RouterPolicies(
        tuple(served_policy(content, policy) for content, policy in policies),
        {policy.name: tuple(step.share for step in policy.steps) for _, policy in policies},
    )


def _limit(report: CertificateReport) -> MonitorLimit:
    """Return the limit for the traffic of a policy, of which the labels are not known.

    Against labels, it is on answers that differ, too. That the calibration is wrong about these has
    the same chance as that the monitor is, and both together that of a false alarm.
    """
    assert report.file and report.policy
    if report.differing is not None:
        return MonitorLimit(report.differing, FALSE_ALARM / 2)
    return MonitorLimit(report.policy.risk, FALSE_ALARM, report.file.min_ari)


def policies_of(routes: Mapping[str, Any]) -> tuple[PolicyRoute, ...]:
    """Return the policies in routes.json.

    Raises: SaccadeError for a missing, unknown or wrong key.
    """
    policies: tuple[PolicyRoute, ...] = _read(tuple[PolicyRoute, ...], routes.get(KEY, ()), KEY)
    return policies


def _read(kind: Any, content: Any, key: str) -> Any:
    try:
        return typed(kind, content, key)
    except SaccadeError as error:
        raise SaccadeError(str(error).replace(AGAIN, _AGAIN)) from error


def policy_faults(policies: Sequence[PolicyRoute], hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with policies for variants of these hashes, one sentence each."""
    for reason in _contradictions(policies):
        yield f"{reason} {_AGAIN}"
    for policy in policies:
        for reason in (*_numbers_outside(policy), *_chain_faults(policy, hashes)):
            yield f"policy {policy.name}: {reason} {_AGAIN}"


def _contradictions(policies: Sequence[PolicyRoute]) -> Iterator[str]:
    for name, count in Counter(policy.name for policy in policies).items():
        if count > 1:
            yield f"found {count} policies with the name {name}, expected one."
    full = {policy.full: policy.name for policy in policies}
    if len(full) > 1:
        pairs = ", ".join(f"{policy} with {variant}" for variant, policy in sorted(full.items()))
        yield f"policies are compared with different full models ({pairs}), expected one."


def _numbers_outside(
    part: PolicyRoute | StepRoute | AdaptiveRules | MonitorRules | MonitorLimit,
) -> Iterator[str]:
    for name, value in vars(part).items():
        bounds = _BOUNDS.get(name)
        if bounds and value is not None and not bounds.holds(value):
            yield f"{name} is {value:g}, expected {bounds}."


def _chain_faults(policy: PolicyRoute, hashes: Mapping[str, str]) -> Iterator[str]:
    if missing := sorted(_needed(policy) - set(hashes)):
        yield f"needs {missing[0]}, which is not in the repository."
    for step in policy.steps:
        yield from _numbers_outside(step)
        if step.variant in hashes and hashes[step.variant] != step.sha256:
            yield (
                f"was certified with {step.variant} of SHA-256 {step.sha256[:12]}..., the "
                f"repository has {hashes[step.variant][:12]}...."
            )
    *early, last = [step.threshold for step in policy.steps] or [0.0]
    chain = [step.variant for step in policy.steps]
    if last is not None or None in early or len(set(chain)) < len(chain) or len(chain) > MOST_STEPS:
        yield "is not a chain: expected different variants, each but the last with a threshold."
    if policy.early is not None and chain[-1:] != [policy.full]:
        yield f"stops with some classes only, but does not end in the full model, {policy.full}."


def _needed(policy: PolicyRoute) -> set[str]:
    """Return the variants that the repository must have."""
    return {policy.full, *(step.variant for step in policy.steps)}


def _refusal(problem: str) -> str:
    return f"{problem.rstrip('.')}. Or leave policies out with --no-policies."


def _is_followable(
    file: PolicyFile, policy: Policy, variants: Sequence[VariantFiles], runtime: str, labelled: bool
) -> bool:
    """Return whether a router of these variants can follow a policy; if not, note the reason."""
    components = variants[0].components.values()
    decides = any(spec.name in DECIDES for part in components for spec in part.outputs)
    needed = _needed(served_policy(file, policy))
    reason = ""
    if file.runtime.partition(" ")[0] != runtime:
        reason = f"was calibrated with {file.runtime}, and the repository runs {runtime}"
    elif left_out := sorted(needed - {variant.name for variant in variants}):
        reason = f"needs {left_out[0]}, which the repository leaves out"
    elif not labelled and file.class_names not in (None, variants[0].labels or file.class_names):
        reason = "was calibrated with --per-class and another order of labels"
    elif not (decides or labelled or file.embeds):
        reason = "needs logits, which a router has only with --labels"
    if reason:
        note(f"{file.name}{SUFFIX}: policy {policy.name} is left out: it {reason}")
    return not reason


def served_policy(content: PolicyFile, policy: Policy) -> PolicyRoute:
    """Return a policy of a file as a router follows it."""
    return PolicyRoute(
        name=policy.name,
        against=content.against,
        confidence=content.confidence,
        risk=policy.risk,
        bound=policy.bound,
        measure=policy.measure,
        full=content.full,
        seconds=policy.seconds,
        steps=tuple(
            StepRoute(step.variant, step.sha256, step.threshold, step.temperature, step.share)
            for step in policy.steps
        ),
        early=policy.early,
        embeds=content.embeds,
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
    if content.class_names not in (None, labels):
        return "was calibrated with --per-class and the labels in another order"
    classes = int(read_answers(content, path).classes.max()) + 1
    if classes > len(labels):
        return f"was calibrated with {classes} labels or more, found {len(labels)}"
    return ""


def served_adaptive(
    variants: Sequence[VariantFiles],
    budgets: Mapping[str, float],
    policies: RouterPolicies,
    options: RepositoryOptions,
    *,
    labelled: bool,
) -> AdaptiveRules | None:
    """Return the load-adaptive choice of a repository; None without `--slo-ms`.

    `budgets` are those of the variants by name.

    Raises: SaccadeError if answers of different variants cannot be compared, the floor is not a
        budget, or only one answer is left to choose from.
    """
    if options.slo_ms is None:
        return None
    specs = [spec.name for part in variants[0].components.values() for spec in part.outputs]
    family = variants[0].main.variant.family
    decides = any(task.decide for task in tasks_of(family).values())  # words have logits, too
    if not any(policy.embeds for policy in policies.routes) and (
        not decides or (CHOOSES not in specs and not labelled)
    ):
        raise SaccadeError(
            f"--slo-ms: found a model of family {family}, expected a classifier: other "
            "answers of different variants cannot take each other's place. Drop --slo-ms"
            + (
                ", pass --labels, or run `saccade calibrate --embedding` first."
                if "embedding" in specs
                else "."
            )
        )
    named = {one.main.variant.setting: budgets[one.name] for one in variants}
    floor = None if options.floor_budget is None else _floor(options.floor_budget, named)
    adaptive = AdaptiveRules(float(options.slo_ms), floor, dict(policies.shares))
    for reason in adaptive_faults(adaptive, policies.routes, list(budgets.values())):
        raise SaccadeError(f"--slo-ms: {reason}")
    return adaptive


def adaptive_of(routes: Mapping[str, Any]) -> AdaptiveRules | None:
    """Return the load-adaptive choice in routes.json; None if there is none.

    Raises: SaccadeError for a missing, unknown or wrong key.
    """
    adaptive: AdaptiveRules | None = _read(
        AdaptiveRules | None, routes.get(ADAPTIVE), f"{ADAPTIVE}: "
    )
    return adaptive


def adaptive_faults(
    adaptive: AdaptiveRules, policies: Sequence[PolicyRoute], budgets: Sequence[float]
) -> Iterator[str]:
    """Yield what is wrong with a choice among these policies and budgets, one sentence each."""
    yield from _numbers_outside(adaptive)
    steps = {policy.name: len(policy.steps) for policy in policies}
    if {name: len(ends) for name, ends in adaptive.shares.items()} != steps:
        yield f"expected the shares of each step of {', '.join(steps) or 'no policy'}. {_AGAIN}"
    for name, ends in adaptive.shares.items():
        if abs(sum(ends) - 1) > _ROUNDED or min(ends) < 0:
            yield f"the shares of policy {name} add up to {sum(ends):g}, expected 1. {_AGAIN}"
    floor, largest = adaptive.floor_budget, max(budgets)
    if floor is not None and floor > largest:
        yield (
            f"found --floor-budget {floor:g}, expected at most {largest:g}, the largest budget "
            "of the folder."
        )
    elif not policies and not any((floor or 0.0) <= one < largest for one in budgets):
        above = f" of at least {floor:g} (--floor-budget)" if floor is not None else ""
        yield (
            f"found one budget{above} and no policies, expected something to choose from. Export "
            "more budgets, or calibrate policies with: saccade calibrate FOLDER --data DATA"
        )


def served_monitor(policies: RouterPolicies, options: RepositoryOptions) -> MonitorRules | None:
    """Return which answers of policies are compared with the full model's; None if there are none.

    Raises: SaccadeError if images are to be kept where none are sampled, or in the repository.
    """
    limits, keep = dict(policies.limits), options.keep_samples
    if keep is not None and not (limits and options.monitor):
        raise SaccadeError(
            "--keep-samples: found no answers of policies that are sampled. Drop --monitor 0 or "
            "--no-policies, calibrate the folder with `saccade calibrate`, or drop --keep-samples."
        )
    if keep is not None and keep.absolute().is_relative_to(options.out.absolute()):
        raise SaccadeError(
            f"--keep-samples is {keep}, expected a folder outside of the repository, whose files "
            "must not change. Pass another folder."
        )
    if not (limits and options.monitor):
        return None
    return MonitorRules(options.monitor, limits, None if keep is None else str(keep.absolute()))


def monitor_of(routes: Mapping[str, Any]) -> MonitorRules | None:
    """Return the monitor in routes.json; None if there is none.

    Raises: SaccadeError for a missing, unknown or wrong key.
    """
    monitor: MonitorRules | None = _read(MonitorRules | None, routes.get(MONITOR), f"{MONITOR}: ")
    return monitor


def monitor_faults(monitor: MonitorRules, policies: Sequence[PolicyRoute]) -> Iterator[str]:
    """Yield what is wrong with a monitor of these policies, one sentence each."""
    yield from _numbers_outside(monitor)
    for limit in monitor.limits.values():
        yield from _numbers_outside(limit)
    if monitor.limits.keys() != (names := {one.name for one in policies if not one.embeds}):
        yield f"expected the limits of {', '.join(sorted(names)) or 'no policy'}. {_AGAIN}"


def _floor(given: float | str, named: Mapping[str, float]) -> float:
    """Return the floor as a number; `named` are the folder's budgets by their names."""
    if given in named:
        return float(named[str(given)])
    try:
        return float(Budget(given))
    except SaccadeError as error:
        raise SaccadeError(
            f"--floor-budget is {given!r:.60}, expected a number above 0 and at most 1, or one of "
            f"{', '.join(named)}."
        ) from error
