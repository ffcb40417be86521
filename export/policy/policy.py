# SPDX-License-Identifier: Apache-2.0
"""Policies beside `frontier.json`: a JSON file per calibration, and its answers."""

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np

from saccade.core.archives import ArchiveRefused, read_arrays
from saccade.core.errors import SaccadeError
from saccade.core.files import check_digest, json_bytes, sha256_of, write_together
from saccade.core.json_text import parse_json
from saccade.core.schema import Count, Natural, Positive, Probability, Range, Share
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.artefact.manifest_checks import odd_hashes, read_stored
from saccade.exporter.policy.answers import (
    MEASURES,
    SPACES,
    Answers,
    CalibratedVariant,
    agreement_classes,
)
from saccade.exporter.policy.bounds import binomial_bound
from saccade.exporter.policy.certify import Certificate, Chain, ClassRisk, certify
from saccade.exporter.policy.classes import certify_classes
from saccade.exporter.policy.maps import ROUTER, SpaceMap
from saccade.exporter.policy.options import MOST_STEPS, Against, check_policy_name, name_by_risk

SCHEMA = "saccade.policies"
VERSION = 2
SUFFIX = ".policy.json"
ANSWERS_SUFFIX = ".policy.npz"
FALSE_ALARM = 0.05  # chance that the router withdraws a policy without reason, over its life
Measure = Literal["top1", "margin", "entropy"]
Risk = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True)
class CalibratedStep:
    """One variant of a chain: it answers if its confidence is at least the threshold."""

    variant: str
    sha256: str
    threshold: float | None  # None: the last step, which always answers
    temperature: Positive
    share: Share  # of the calibration samples that end here


@dataclass(frozen=True)
class Policy:
    """A chain of variants whose risk is certified.

    `early` are the places of the classes with which a step but the last may stop (None: all), and
    `classes` what was certified of each class on its own, and of the others together.
    Units:  risk, bound and observed are shares of samples, seconds are per sample.
    """

    name: str
    risk: Risk
    bound: Annotated[float, Range(-1, 1)]  # upper confidence bound on the samples that certify
    observed: Annotated[float, Range(-1, 1)]  # mean loss of the samples that certify
    measure: Measure
    steps: tuple[CalibratedStep, ...]
    seconds: Positive
    full_seconds: Positive
    early: tuple[Natural, ...] | None = None
    classes: tuple[ClassRisk, ...] = ()


@dataclass(frozen=True)
class PolicyFile:
    """The policies of one calibration, and all that their certificates follow from."""

    name: str
    model: str
    task: str
    against: Against
    confidence: Probability
    most_steps: Annotated[int, Range(1, MOST_STEPS)]
    data: str
    data_sha256: str
    split: str
    seed: Natural
    samples: Count
    learn: Count  # of the samples; the others certify
    runtime: str
    device: str
    full: str  # the variant that the others are compared with
    variants: tuple[CalibratedVariant, ...]  # the cheapest first
    answers_sha256: str
    policies: tuple[Policy, ...]
    labels_sha256: str | None = None  # `texts_sha256` of zero-shot labels and of their templates
    templates_sha256: str | None = None
    # of segmentations: the adjusted Rand index at which an answer counts as the full model's
    min_ari: Share | None = None
    # other data that chose: its samples are the ones to learn from, and all of `data` certify
    choose_data: str | None = None
    choose_data_sha256: str | None = None
    choose_split: str | None = None
    # of embeddings: the index of vectors and their number, and maps between spaces
    index: str | None = None
    index_sha256: str | None = None
    vectors: Count | None = None
    maps: tuple[SpaceMap, ...] | None = None
    class_names: tuple[str, ...] | None = None  # of all classes, if each one is certified

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, schema and version included."""
        values = asdict(self)
        own = {key: value for key, value in values.items() if value is not None}
        return {"schema": SCHEMA, "version": VERSION, **own}

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that cannot be computed from the answers, beside which they are repeated."""
        computed = ("schema", "version", "answers_sha256", "policies")
        return {key: value for key, value in self.to_dict().items() if key not in computed}

    @property
    def embeds(self) -> bool:
        """True if the policies are for embeddings, False if for classes or segmentations."""
        return self.maps is not None

    @property
    def answers_name(self) -> str:
        """The name of the file of answers, which contains their hash."""
        return f"{self.name}.{self.answers_sha256[:12]}{ANSWERS_SUFFIX}"

    @property
    def risks(self) -> tuple[float, ...]:
        """The risks that were certified."""
        return tuple(policy.risk for policy in self.policies)


_FACTS = "facts"  # the array that repeats them
# Keys that only some files have.
_ABSENT = {field.name: None for field in fields(PolicyFile) if field.default is None}


def policy_of(name: str, certified: Certificate, answers: Answers) -> Policy:
    """Return a certified chain under a name, with the hashes of its variants."""
    chain = certified.chain
    thresholds = (*chain.thresholds, None)
    steps = tuple(
        CalibratedStep(own.variant, own.sha256, threshold, own.temperature, round(share, 6))
        for own, threshold, share in zip(
            (answers.variants[at] for at in chain.steps), thresholds, certified.shares, strict=True
        )
    )
    return Policy(
        name=name,
        risk=certified.risk,
        bound=round(certified.bound, 6),
        observed=round(certified.observed, 6),
        measure=cast(Measure, chain.measure),
        steps=steps,
        seconds=float(f"{certified.seconds:.9g}"),
        full_seconds=answers.variants[answers.full].seconds,
        early=chain.early,
        classes=certified.classes,
    )


def with_answers(content: PolicyFile, answers: Answers) -> tuple[PolicyFile, bytes]:
    """Return the policies with the hash of their file of answers, and this file."""
    arrays = answers.to_npz(json_bytes(content.facts))
    return replace(content, answers_sha256=hashlib.sha256(arrays).hexdigest()), arrays


def write_policies(folder: Path, content: PolicyFile, answers: bytes) -> Path:
    """Write the file and the answers beside it, both or neither; older ones of the name go.

    A process that is killed between the two leaves the older policy with its own answers, because
    the names of answers contain their hash.
    """
    path = folder / (content.name + SUFFIX)
    own = folder / content.answers_name
    write_together({own: answers, path: json_bytes(content.to_dict())})
    for older in folder.glob("*" + ANSWERS_SUFFIX):
        if older != own and re.fullmatch(
            re.escape(content.name) + r"\.[0-9a-f]{12}", older.name.removesuffix(ANSWERS_SUFFIX)
        ):
            older.unlink(missing_ok=True)
    return path


def texts_sha256(texts: Iterable[str]) -> str:
    """Return the hash of labels or templates, whose order does not matter to a policy."""
    return hashlib.sha256(json_bytes(sorted(texts))).hexdigest()


def calibrate_again(folder: Path) -> str:
    """Return what to do about a policy that cannot be used."""
    return f"Calibrate again with: {_calibrate(folder)}"


def check_kind(folder: Path, name: str, *, embeds: bool) -> None:
    """Check that no policies of another kind have this name, which would be replaced.

    Raises: SaccadeError otherwise.
    """
    path = folder / f"{name}{SUFFIX}"
    if path.exists() and read_policies(path).embeds != embeds:
        raise SaccadeError(
            f"{path}: has policies for {'classes' if embeds else 'embeddings'}, which would be "
            "replaced. Pass another --name, or delete the file."
        )


def _calibrate(folder: Path) -> str:
    return f"saccade calibrate {shlex.quote(str(folder))} --data DATA"


def read_policies(path: Path) -> PolicyFile:
    """Read a policy file and check every key.

    Raises: SaccadeError for a foreign file, an unknown version, an unknown, missing or wrong key,
        or steps that make no chain.
    """
    return read_stored(
        path,
        PolicyFile,
        SCHEMA,
        VERSION,
        complete=_complete,
        problems=lambda content: _contradictions(content, path.name),
        command=_calibrate(path.parent),
    )


def _complete(content: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that only some files have, or that earlier releases did not write."""
    known: dict[str, Any] = {"early": None, "classes": []}
    if isinstance(policies := content.get("policies"), list):
        policies = [{**known, **one} if isinstance(one, dict) else one for one in policies]
        content = {**content, "policies": policies}
    return {**_ABSENT, **content}


def policy_files(folder: Path) -> list[Path]:
    """Return the policy files of an artefact folder, by name."""
    return sorted(folder.glob("*" + SUFFIX))


def check_variants(content: PolicyFile, path: Path, variants: Mapping[str, VariantFiles]) -> None:
    """Check that the variants of a calibration are still those of the folder.

    Raises: SaccadeError that names the first one that is missing or has other bytes.
    """
    for problem in _changed(content, variants):
        raise SaccadeError(f"{path}: {problem}. {calibrate_again(path.parent)}")


def _changed(content: PolicyFile, variants: Mapping[str, VariantFiles]) -> Iterator[str]:
    for source in content.variants:
        if (there := variants.get(source.variant)) is None:
            yield f"was calibrated with {source.variant}, which is not in the folder"
        elif there.sha256 != source.sha256:
            yield (
                f"was calibrated with {source.variant} of SHA-256 {source.sha256[:12]}..., the "
                f"folder has {there.sha256[:12]}..."
            )


def read_answers(content: PolicyFile, path: Path) -> Answers:
    """Read the answers that a policy file was made from.

    Raises: SaccadeError if they are missing, changed, or do not fit the file.
    """
    again = calibrate_again(path.parent)
    place = path.with_name(content.answers_name)
    if not place.is_file():
        raise SaccadeError(
            f"{place}: missing; it contains the answers that {path.name} was certified with. "
            f"Put it back, if you have it. {again}"
        )
    check_digest(place, sha256_of(place), content.answers_sha256, f"in {path.name}", again)
    try:
        arrays = read_arrays(place)
    except (OSError, ArchiveRefused) as error:
        raise SaccadeError(f"{place}: cannot be read ({error}). {again}") from error
    return _answers(content, arrays, place)


def _answers(content: PolicyFile, arrays: Mapping[str, np.ndarray], place: Path) -> Answers:
    v, n = len(content.variants), content.samples
    answers = "classes" if content.min_ari is None else "agreement"
    spaces = {
        name.removeprefix(SPACES): array
        for name, array in arrays.items()
        if name.startswith(SPACES)
    }
    maps = {made.name for made in content.maps or () if made.used}
    shapes = {answers: (v, n), "confidence": (len(MEASURES), v, n), "labels": (n,)}
    kinds = {"classes": "i", "agreement": "f", "confidence": "f", "labels": "i"}
    found = {
        name: (array.shape, array.dtype.kind)
        for name, array in arrays.items()
        if name != _FACTS and not name.startswith(SPACES)
    }
    expected = {
        name: (shape, kinds[name])
        for name, shape in shapes.items()
        if name in found or name != "labels"
    }
    complete = _FACTS in arrays and maps == spaces.keys() - {ROUTER.ANCHORS}
    if found != expected or not complete or not content.learn < n:
        raise SaccadeError(
            f"{place}: contains {found}, expected {expected}, and fewer than {n} samples to learn "
            f"from, with the maps {sorted(maps)}. {calibrate_again(place.parent)}"
        )
    _check_facts(content, arrays[_FACTS], place)
    return Answers(
        variants=content.variants,
        full=[source.variant for source in content.variants].index(content.full),
        learn=content.learn,
        classes=arrays["classes"]
        if content.min_ari is None
        else agreement_classes(arrays["agreement"], content.min_ari),
        confidence=arrays["confidence"],
        labels=arrays.get("labels"),
        agreement=arrays.get("agreement"),
        apart=content.choose_data is not None,
        spaces=spaces,
    )


def _check_facts(content: PolicyFile, found: np.ndarray, place: Path) -> None:
    """Check that both files state the same about their calibration.

    Raises: SaccadeError that names the first field that differs.
    """
    again = calibrate_again(place.parent)
    try:
        facts: dict[str, Any] = dict(parse_json(found.tobytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise SaccadeError(f"{place}: cannot be read ({error!r:.200}). {again}") from error
    own = parse_json(json_bytes(content.facts))
    if changed := [key for key in {**own, **facts} if own.get(key) != facts.get(key)]:
        key = changed[0]
        raise SaccadeError(
            f"{place.with_name(content.name + SUFFIX)}: {key} is {own.get(key)!r:.200}, but the "
            f"calibration gives {facts.get(key)!r:.200}. The file was changed after its "
            f"calibration. {again}"
        )


def _contradictions(content: PolicyFile, file: str) -> Iterator[str]:
    sources = {source.variant: source for source in content.variants}
    if content.name + SUFFIX != file:
        yield f"is the file of {content.name + SUFFIX!r}. Rename it back"
    yield from odd_hashes((content.answers_sha256,))  # a part of it names a file
    if content.full not in sources or len(sources) < len(content.variants):
        yield (
            f"compares with {content.full!r:.80}, expected one of {', '.join(sources)}, each named "
            "once"
        )
    names = [policy.name for policy in content.policies]
    if not names or len(set(names)) < len(names):
        yield (
            f"has the policies {', '.join(names) or 'none'}, expected one or more of different "
            "names"
        )
    for policy in content.policies:
        expected = name_by_risk(content.name, policy.risk)
        if policy.name not in (content.name, expected):
            yield (
                f"found policy {policy.name!r:.80} of risk {policy.risk:g}, expected the name "
                f"{expected}"
            )
        check_policy_name(policy.name)
        *early, last = [step.threshold for step in policy.steps] or [0.0]
        known = [sources.get(step.variant) for step in policy.steps]
        alike = all(
            source and (step.sha256, step.temperature) == (source.sha256, source.temperature)
            for step, source in zip(policy.steps, known, strict=True)
        )
        if last is not None or None in early or not alike:
            yield (
                f"policy {policy.name} is not a chain: expected steps of calibrated variants, each "
                "but the last with a threshold"
            )


@dataclass(frozen=True)
class CertificateReport:
    """One policy whose certificate was computed again, or the file that allows no such thing."""

    name: str
    policy: Policy | None
    problem: str | None
    file: PolicyFile | None = None  # that the policy is in
    # Upper bound on the share of answers that differ from the full model's; only against labels.
    differing: float | None = None

    @property
    def passed(self) -> bool:
        """True if the file agrees with its samples."""
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        bound = None if self.policy is None else self.policy.bound
        return {"name": self.name, "passed": self.passed, "problem": self.problem, "bound": bound}


def check_certificates(folder: Path, variants: Sequence[VariantFiles]) -> list[CertificateReport]:
    """Compute the certificate of every policy in a folder again.

    A file that cannot be read, or that was made with other variants, is a report that did not
    pass.
    """
    by_name = {variant.name: variant for variant in variants}
    reports: list[CertificateReport] = []
    for path in policy_files(folder):
        try:
            content = read_policies(path)
            check_variants(content, path, by_name)
            reports += _again(content, path)
        except SaccadeError as error:
            reports.append(CertificateReport(path.name, None, str(error)))
    return reports


def _again(content: PolicyFile, path: Path) -> list[CertificateReport]:
    answers = read_answers(content, path)
    search = partial(certify_classes, names=content.class_names) if content.class_names else certify
    found = search(
        answers,
        content.risks,
        confidence=content.confidence,
        against=content.against,
        steps=content.most_steps,
    )
    reports = []
    for policy, result in zip(content.policies, found, strict=True):
        problem = differing = None
        if not isinstance(result, Certificate):
            problem = (
                f"the samples do not certify a risk of {policy.risk:g}: the bound reached is "
                f"{result.bound:.4f}"
            )
        elif (expected := policy_of(policy.name, result, answers)) != policy:
            problem = _difference(policy, expected)
        elif content.against == "labels":
            differing = _differing(answers, result.chain)
        if problem is not None:
            problem = f"{path}: policy {policy.name}: {problem}. {calibrate_again(path.parent)}"
        reports.append(CertificateReport(policy.name, policy, problem, content, differing))
    return reports


def _differing(answers: Answers, chain: Chain) -> float:
    lost = chain.losses(answers.testing, answers.differs[:, answers.learn :])
    return round(binomial_bound(int(lost.sum()), len(lost), 1 - FALSE_ALARM / 2), 6)


def _difference(found: Policy, expected: Policy) -> str:
    """Return the first field in which two policies differ, with both values."""
    pairs: list[tuple[str, Policy | CalibratedStep, Policy | CalibratedStep]] = [
        ("", found, expected)
    ]
    pairs += [
        (f"step {number}, {own.variant}: ", own, other)
        for number, (own, other) in enumerate(zip(found.steps, expected.steps, strict=False), 1)
    ]
    fields = [
        (f"{where}{name}", value, getattr(other, name))
        for where, own, other in pairs
        for name, value in vars(own).items()
        if name != "steps"
    ]
    fields.append(("the number of steps", len(found.steps), len(expected.steps)))
    name, value, other = next(field for field in fields if field[1] != field[2])
    return (
        f"{name} is {value!s:.200}, but the calibration gives {other!s:.200}. The file was changed "
        "after its calibration"
    )
