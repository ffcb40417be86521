# SPDX-License-Identifier: Apache-2.0
"""Report of the checks: one finding per check and model."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not checked"]
_MARKS = {"passed": "ok", "failed": "FAILED", "not checked": "-"}


class NotChecked(Exception):
    """Raised when a check cannot be made here; the message gives the reason."""


@dataclass(frozen=True)
class Finding:
    """One check of one model, or of the whole repository (`model` is empty)."""

    check: str
    model: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreflightReport:
    """All findings, and the server that the repository was checked for."""

    repository: str
    server: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Findings that would make a server fail or give wrong answers."""
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    @property
    def passed(self) -> bool:
        """True if no check failed; checks that were not made do not count."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "repository": self.repository,
            "server": self.server,
            "passed": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if any check failed, else 0."""
        return 0 if self.passed else 1

    def to_text(self) -> str:
        """Return the report as text: every reason, and the number of checks that passed."""
        lines = []
        for finding in self.findings:
            where = f"{finding.model}: " if finding.model else ""
            for reason in finding.reasons:
                lines.append(f"{_MARKS[finding.verdict]:6} {where}{finding.check}: {reason}")
        passed, failed = sum(f.verdict == "passed" for f in self.findings), len(self.failed)
        verdict = "ready to serve. " if self.passed else f"{_checks(failed)} failed, "
        lines.append(f"{self.repository}: {verdict}{_checks(passed)} passed for {self.server}.")
        return "\n".join(lines)


def _checks(number: int) -> str:
    return "1 check" if number == 1 else f"{number} checks"
