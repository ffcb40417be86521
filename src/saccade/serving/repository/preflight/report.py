# SPDX-License-Identifier: Apache-2.0
"""Report of the checks, one finding a check and model."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not checked"]
_MARKS = {"passed": "ok", "failed": "FAILED", "not checked": "-"}


class NotChecked(Exception):
    """A check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One check of one model, or of the whole repository (`model` is empty)."""

    check: str
    model: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreflightReport:
    """All findings, and the server that they are for."""

    repository: str
    server: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Those that would make a server fail, or answer wrongly."""
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    @property
    def passed(self) -> bool:
        """True if nothing failed; what was not checked does not count."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "repository": self.repository,
            "server": self.server,
            "passed": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def exit_code(self) -> int:
        """1 if anything failed."""
        return 0 if self.passed else 1

    def to_text(self) -> str:
        """For a reader: every reason, and passed checks by number only."""
        lines = []
        for finding in self.findings:
            where = f"{finding.model}: " if finding.model else ""
            for reason in finding.reasons:
                lines.append(f"{_MARKS[finding.verdict]:6} {where}{finding.check}: {reason}")
        count = sum(finding.verdict == "passed" for finding in self.findings)
        verdict = "fit to be served" if self.passed else f"{len(self.failed)} checks failed"
        lines.append(f"{self.repository}: {verdict} ({count} checks passed, for {self.server}).")
        return "\n".join(lines)
