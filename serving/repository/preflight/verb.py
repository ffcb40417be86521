# SPDX-License-Identifier: Apache-2.0
"""Checks a repository in a throw-away process, and goes on where one of the checks ended it."""

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.progress import progress
from saccade.serving.repository.model_config import MODEL_FILE
from saccade.serving.repository.preflight.opened import opened
from saccade.serving.repository.preflight.report import Finding, PreflightReport
from saccade.serving.repository.preflight.target import Target, target_of
from saccade.worker import Limits, Worker

_START_S = 120.0
_NICENESS = 10  # a server beside it goes first
_GIB = 2**30
_UNLOADABLE = ("library", "failed")


@dataclass(frozen=True)
class PreflightOptions:
    """The server that the repository is checked for."""

    server_version: str | None = None  # a container's line, such as 26.07; default: the bundled
    tensorrt_version: str | None = None  # that server's, to hold plans against
    memory_mib: int | None = None  # what the server may use; default: what this machine has
    timeout_s: float = 300.0  # for one check of one model

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise SaccadeError(f"--timeout-s is {self.timeout_s}, expected more than 0 seconds.")
        if self.memory_mib is not None and self.memory_mib < 1:
            raise SaccadeError(f"--memory-mib is {self.memory_mib}, expected at least 1.")


def preflight(folder: Path | str, options: PreflightOptions | None = None) -> PreflightReport:
    """Everything that would make a server fail late, or answer wrongly; nothing is served.

    Raises: SaccadeError if the folder describes no repository, or for a server that is unknown.
    """
    options, folder = options or PreflightOptions(), Path(folder)
    found = opened(folder)
    target = target_of(
        options.server_version,
        options.tensorrt_version,
        options.memory_mib,
        found.deployment.runtime,
    )
    findings: list[Finding] = []
    with progress("preflight", len(found.deployment.variants) + 1) as advance:
        done = False
        while not done:
            run = _Run(folder, findings, target, options.timeout_s)
            with closing(run.findings()) as told:
                for finding in told:
                    if not findings or finding.model != findings[-1].model:
                        advance(1, note=finding.model)
                    findings.append(finding)
            done = run.done
    return PreflightReport(str(folder), target.title, tuple(findings))


class _Run:
    """One process: the findings until it ends; one more where a check ended it."""

    def __init__(
        self, folder: Path, before: Sequence[Finding], target: Target, timeout_s: float
    ) -> None:
        failed = [each.model for each in before if (each.check, each.verdict) == _UNLOADABLE]
        request = {
            "folder": str(folder.resolve()),
            "start": len(before),
            "target": asdict(target),
            "unloadable": failed,
        }
        limits = Limits(_memory_bytes(folder), niceness=_NICENESS)
        self._worker = Worker("saccade.serving.repository.preflight.child", request, limits)
        self._timeout_s = timeout_s
        self.done = False

    def findings(self) -> Generator[Finding, None, None]:
        """Each as it is told; the process is gone when they end or are closed."""
        begun: tuple[str, str] | None = None
        try:
            while (told := self._next(begun)) is not None:
                if "finding" in told:
                    begun = None
                    yield Finding(
                        **{**told["finding"], "reasons": tuple(told["finding"]["reasons"])}
                    )
                elif "begins" in told:
                    begun = tuple(told["begins"])
                else:
                    self.done = True
        except TimeoutError:
            if begun is None:
                raise SaccadeError(self._stillborn("says nothing")) from None
            reason = f"the check did not end within {self._timeout_s:g} s."
            yield Finding(*begun, "failed", (reason,))
            return
        finally:
            self._worker.close()
        if begun is not None:
            ending = self._worker.ending()
            yield Finding(*begun, "failed", (f"what it loads ended the process ({ending}).",))
        elif not self.done:
            raise SaccadeError(self._stillborn(self._worker.ending()))

    def _next(self, begun: tuple[str, str] | None) -> dict[str, Any] | None:
        # Before and between checks Python itself loads and reads; a busy machine may take long.
        allowed = self._timeout_s if begun else max(_START_S, self._timeout_s)
        return self._worker.receive(allowed)

    def _stillborn(self, how: str) -> str:
        said = self._worker.last_words
        return f"The process of the checks ended before the first one ({how}). {said} Try again."


def _memory_bytes(folder: Path) -> int:
    """Room for libraries, and for some copies of the largest model's weights."""
    sizes = [path.stat().st_size for path in folder.glob(f"*/1/{MODEL_FILE}") if path.is_file()]
    return 8 * _GIB + 8 * max(sizes, default=0)
