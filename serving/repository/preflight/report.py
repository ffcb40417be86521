# SPDX-License-Identifier: Apache-2.0
"""Report of the checks: one finding per check and model."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.machine import memory_limit_bytes
from saccade.exporter.runtimes.gpu import Gpu, gpus
from saccade.serving.repository.installation import BUNDLED_LINE
from saccade.serving.repository.runtimes.registry import served_runtime

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


# Triton's own version number -> the release of the container.
_SERVER_VERSIONS = {"2.51": "24.10", "2.51.0": "24.10"}


@dataclass(frozen=True)
class Target:
    """The server and machine that the checks compare the repository with."""

    line: str = BUNDLED_LINE  # NVIDIA's release, YY.MM
    bundled: bool = True  # the server of the pip package, with saccade's Python backend
    tensorrt: str | None = None  # the server's TensorRT version, if the user named it
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def title(self) -> str:
        """Description of the server for messages."""
        return f"the bundled server ({self.line})" if self.bundled else f"the container {self.line}"


def target_of(
    server_version: str | None, tensorrt: str | None, memory_mib: int | None, runtime: str
) -> Target:
    """Return the target that the user named.

    Without a version it is the bundled server, or a container where the repository has plans.

    Raises: SaccadeError if the version is malformed, or older than saccade supports.
    """
    memory = memory_mib * 2**20 if memory_mib else memory_limit_bytes()
    bundled = server_version is None and served_runtime(runtime).bundled
    line = _SERVER_VERSIONS.get(server_version or BUNDLED_LINE, server_version or BUNDLED_LINE)
    if not re.fullmatch(r"2[0-9]\.(0[1-9]|1[0-2])", line):
        raise SaccadeError(
            f"--server-version is {server_version!r}, expected the version in a container's tag, "
            f"such as {BUNDLED_LINE} (server 2.51)."
        )
    if _as_numbers(line) < _as_numbers(BUNDLED_LINE):
        raise SaccadeError(
            f"--server-version is {line}, expected {BUNDLED_LINE} (server 2.51) or newer. Use a "
            "newer container."
        )
    return Target(line, bundled, tensorrt, memory, gpus())


def _as_numbers(line: str) -> tuple[int, ...]:
    return tuple(int(part) for part in line.split("."))
