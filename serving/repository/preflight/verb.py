# SPDX-License-Identifier: Apache-2.0
"""Check a repository in a disposable process, and resume in a new one if a check kills it.

The contents of the repository are loaded there. If a library or a model kills the process, the
check that got no answer names it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from saccade.core.options import Options
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.core.schema import Count, Positive
from saccade.core.worker import Limits, Worker, WorkerEnded
from saccade.exporter.graph.trial import limits_for
from saccade.serving.repository.preflight.examine import steps
from saccade.serving.repository.preflight.report import Finding, PreflightReport, Target, target_of
from saccade.serving.repository.preflight.repository import open_repository

_NICENESS = 10  # a server on the same machine takes precedence
_GIB = 2**30


@dataclass(frozen=True)
class PreflightOptions(Options):
    """The server that the repository is checked for."""

    server_version: str | None = None  # a container's tag, such as 26.07; default: bundled server
    tensorrt_version: str | None = None  # that server's TensorRT, to compare plans with
    memory_mib: Count | None = None  # memory of the server; default: all memory of this machine
    timeout_s: Positive = 300.0  # per check of one model


def preflight(
    folder: Path | str,
    options: PreflightOptions | None = None,
    *,
    progress: Report | None = bar,
) -> PreflightReport:
    """Check a repository for everything that would make a server fail late or answer wrongly.

    No server is started.

    Raises: SaccadeError if the folder is not a repository, or the server version is unknown.
    """
    options, folder = options or PreflightOptions(), Path(folder)
    repository = open_repository(folder)
    target = target_of(
        options.server_version,
        options.tensorrt_version,
        options.memory_mib,
        repository.deployment.runtime,
    )
    findings: list[Finding] = []
    checked = Checked(str(folder.resolve()), target)
    largest = _largest_bytes(folder)
    # Room for libraries and several copies of the largest model, and time to load it.
    limits = Limits(8 * _GIB + 8 * largest, limits_for(largest).cpu_s, _NICENESS)
    with (
        reporting(progress),
        progress_of("preflight", len(repository.deployment.variants) + 1) as advance,
        Worker(__name__, limits) as worker,
    ):
        for number, (check, model, _) in enumerate(steps(repository, target)):
            if not findings or model != findings[-1].model:
                advance(1, note=model)
            try:
                finding = worker.ask(Check(number, checked), Finding, options.timeout_s)
            except WorkerEnded as ended:
                reason = f"loading it stopped the process ({ended})."
                finding = Finding(check, model, "failed", (reason,))
                failed = (one.model for one in [*findings, finding] if _is_unloadable(one))
                checked = replace(checked, unloadable=tuple(failed))
            findings.append(finding)
    return PreflightReport(str(folder), target.title, tuple(findings))


@dataclass(frozen=True)
class Checked:
    """The repository, its server, and the models whose library has already killed a process."""

    folder: str
    target: Target
    unloadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One check, by its number in `steps`."""

    number: int
    of: Checked


def main(check: Check) -> Finding:
    """Make one check. Runs in the disposable process."""
    _, _, run = _steps(check.of)[check.number]
    return run()


@cache
def _steps(checked: Checked) -> list[tuple[str, str, Callable[[], Finding]]]:
    repository = open_repository(Path(checked.folder))
    return steps(repository, checked.target, frozenset(checked.unloadable))


def _is_unloadable(finding: Finding) -> bool:
    return (finding.check, finding.verdict) == ("library", "failed")


def _largest_bytes(folder: Path) -> int:
    """Return the bytes of the largest model: its graph with its data, or its plans."""
    sizes = [
        sum(path.stat().st_size for path in version.iterdir() if path.is_file())
        for version in folder.glob("*/1")
    ]
    return max(sizes, default=0)
