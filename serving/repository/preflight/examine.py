# SPDX-License-Identifier: Apache-2.0
"""All checks in order: those of the repository as a whole, then those of each model."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.serving.repository.description import entries
from saccade.serving.repository.preflight import config_checks, model_checks, repository_checks
from saccade.serving.repository.preflight.report import Finding, NotChecked, Target
from saccade.serving.repository.preflight.repository import Repository, open_repository
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
    "configuration": config_checks.check_config,
    "versions": config_checks.check_versions,
}
ROUTER: dict[str, RepositoryCheck] = {
    "fields": repository_checks.check_fields,
    "content": repository_checks.check_content,
    "router": repository_checks.check_router,
    "routes": repository_checks.check_routes,
}
# The checks of the runtime come after these.
MODEL: dict[str, ModelCheck] = {
    **ANY_MODEL,
    "fields": config_checks.check_fields,
    "content": config_checks.check_content,
    "instances": config_checks.check_instances,
    "manifest": model_checks.check_manifest,
    "labels": config_checks.check_labels,
    "sample": model_checks.check_sample,
    "warm-up": model_checks.check_warmup,
}
LAST: dict[str, RepositoryCheck] = {"memory": repository_checks.check_memory}
# Checks that load nothing: `deploy` applies them to what it has written.
RULES = ("configuration", "versions", "fields", "content", "labels", "sample", "warm-up")


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
