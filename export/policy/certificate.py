# SPDX-License-Identifier: Apache-2.0
"""Certificates computed again from the answers beside a policy file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.policy.certify import Certificate, certify
from saccade.exporter.policy.policy import (
    CalibratedStep,
    Policy,
    PolicyFile,
    calibrate_again,
    check_variants,
    policy_files,
    policy_of,
    read_answers,
    read_policies,
)


@dataclass(frozen=True)
class CertificateReport:
    """One policy whose certificate was computed again, or the file that allows no such thing."""

    name: str
    policy: Policy | None
    problem: str | None
    file: PolicyFile | None = None  # that the policy is in

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
    found = certify(
        answers,
        content.risks,
        confidence=content.confidence,
        against=content.against,
        steps=content.most_steps,
    )
    reports = []
    for policy, result in zip(content.policies, found, strict=True):
        problem = None
        if not isinstance(result, Certificate):
            problem = (
                f"the samples do not certify a risk of {policy.risk:g}: the bound reached is "
                f"{result.bound:.4f}"
            )
        elif (expected := policy_of(policy.name, result, answers)) != policy:
            problem = _difference(policy, expected)
        if problem is not None:
            problem = f"{path}: policy {policy.name}: {problem}. {calibrate_again(path.parent)}"
        reports.append(CertificateReport(policy.name, policy, problem, content))
    return reports


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
        f"{name} is {value}, but the calibration gives {other}. The file was changed after its "
        "calibration"
    )
