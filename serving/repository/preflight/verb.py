# SPDX-License-Identifier: Apache-2.0
"""All checks of a repository, in a disposable process; a new one resumes if a check kills it.

The contents of the repository are loaded there. If a library or a model kills the process, the
check that got no answer names it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.core.options import Options
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.core.schema import Count, Positive
from saccade.core.worker import Limits, Worker, WorkerEnded
from saccade.exporter.graph.trial import limits_for
from saccade.serving.repository.description import entries
from saccade.serving.repository.preflight import model_checks, repository_checks
from saccade.serving.repository.preflight.repository import (
    Finding,
    NotChecked,
    PreflightReport,
    Repository,
    Target,
    open_repository,
    target_of,
)
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.runtimes.served_runtime import ModelCheck

# A check: its name, that of its model or of none, and how to make it.
NamedCheck = tuple[str, str, Callable[[], Iterator[str]]]
RepositoryCheck = Callable[[Repository, Target], Iterator[str]]
MOST_REASONS = 5  # per check and model: more of the same kind add nothing
REPOSITORY: dict[str, RepositoryCheck] = {
    "files": repository_checks.check_files,
    "models": repository_checks.check_models,
    "top": repository_checks.check_top,
    "machine": repository_checks.check_machine,
}
# Those of any model, whether the router or a variant.
ANY_MODEL: dict[str, ModelCheck] = {
    "configuration": repository_checks.check_config,
    "versions": repository_checks.check_versions,
}
ROUTER: dict[str, RepositoryCheck] = {
    "fields": repository_checks.check_router_fields,
    "content": repository_checks.check_router_content,
    "router": repository_checks.check_router,
    "routes": repository_checks.check_routes,
}
# The checks of the runtime come after these.
MODEL: dict[str, ModelCheck] = {
    **ANY_MODEL,
    "fields": repository_checks.check_fields,
    "content": repository_checks.check_content,
    "instances": repository_checks.check_instances,
    "manifest": model_checks.check_manifest,
    "labels": repository_checks.check_labels,
    "sample": model_checks.check_sample,
    "warm-up": model_checks.check_warmup,
}
LAST: dict[str, RepositoryCheck] = {"memory": repository_checks.check_memory}
# Checks that load nothing: `deploy` applies them to what it has written.
RULES = ("configuration", "versions", "fields", "content", "labels", "sample", "warm-up")
_NICENESS = 10  # a server on the same machine takes precedence
_GIB = 2**30


def steps(
    repository: Repository, target: Target, unloadable: frozenset[str] = frozenset()
) -> list[tuple[str, str, Callable[[], Finding]]]:
    """Return every check with its model's name, in the order in which to make them.

    Models named in `unloadable` are not loaded: their library has already killed a process.
    """
    odd, router = _odd(repository.folder), repository.deployment.model

    def made(check: str, model: str, run: Callable[[], Iterator[str]]) -> Finding:
        if odd is not None and check != "files":
            # Reading a pipe would wait forever, and following a link would load foreign files.
            reason = f"{odd} is not a regular file of the repository."
            return Finding(check, model, "not checked", (reason,))
        if check == "answer" and model in unloadable:
            return Finding(check, model, "not checked", ("its library of ops cannot be loaded.",))
        return _finding(check, model, run)

    every = [
        *_applied(REPOSITORY, "", repository, target),
        *_applied(ANY_MODEL, router, repository.router, target),
        *_applied(ROUTER, router, repository, target),
        *_of_models(repository, target),
        *_applied(LAST, "", repository, target),
    ]
    return [(name, model, partial(made, name, model, run)) for name, model, run in every]


def _of_models(repository: Repository, target: Target) -> list[NamedCheck]:
    checks = {**MODEL, **served_runtime(repository.deployment.runtime).checks}
    models = repository.models
    return [check for one in models for check in _applied(checks, one.name, one, target)]


def _applied(
    checks: Mapping[str, Callable[[Any, Target], Iterator[str]]],
    model: str,
    to: Any,
    target: Target,
) -> list[NamedCheck]:
    return [(name, model, partial(look, to, target)) for name, look in checks.items()]


def broken_rules(folder: Path, target: Target) -> Iterator[str]:
    """Yield the rules that the files of a repository break, each with its model."""
    repository = open_repository(folder)
    rules = {*RULES, *served_runtime(repository.deployment.runtime).rules}
    for name, model, run in _of_models(repository, target):
        if name in rules and (finding := _finding(name, model, run)).verdict == "failed":
            yield from (f"{model}: {reason}" for reason in finding.reasons)


def _odd(folder: Path) -> str | None:
    """Return the first entry that must not be opened; None if all are readable regular files."""
    try:
        return next((entry.name for entry in entries(folder) if entry.kind != "file"), None)
    except OSError as error:
        return str(error.filename)


def _finding(check: str, model: str, run: Callable[[], Iterator[str]]) -> Finding:
    reasons: list[str] = []
    try:
        for reason in islice(run(), MOST_REASONS):
            reasons.append(reason)
    except NotChecked as error:
        if not reasons:
            return Finding(check, model, "not checked", (f"{error}.",))
    except MissingPackage as error:
        if not reasons:
            return Finding(check, model, "not checked", (str(error),))
    except SaccadeError as error:
        reasons.append(str(error))
    except OSError as error:
        # The check of the files reports this too; here it must not stop the other checks.
        reasons.append(f"{error.filename or 'a file'} cannot be read ({error.strerror}).")
    except (
        KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        reasons.append(f"the content does not have the form that saccade writes ({error!r:.200}).")
    return Finding(check, model, "failed" if reasons else "passed", tuple(reasons))


@dataclass(frozen=True)
class PreflightOptions(Options):
    """The server that the repository is checked for."""

    server_version: str | None = None  # a container's tag, such as 26.07; default: bundled server
    tensorrt_version: str | None = None  # that server's TensorRT, to compare plans with
    memory_mib: Count | None = None  # memory of the server; default: all memory of this machine
    timeout_s: Positive = 300.0  # per check of one model


def preflight(
    folder: Path | str, options: PreflightOptions | None = None, *, progress: Report | None = bar
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
