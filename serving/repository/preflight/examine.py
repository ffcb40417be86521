# SPDX-License-Identifier: Apache-2.0
"""All checks in order: those of the repository as a whole, then those of each model."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.serving.repository.description import entries
from saccade.serving.repository.preflight import config_checks, model_checks, repository_checks
from saccade.serving.repository.preflight.report import Finding, NotChecked, Target
from saccade.serving.repository.preflight.repository import Repository, open_repository
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.runtimes.served_runtime import ModelCheck

MOST_REASONS = 5  # per check and model: more of the same kind add nothing
REPOSITORY: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "files": repository_checks.check_files,
    "models": repository_checks.check_models,
    "top": repository_checks.check_top,
    "machine": repository_checks.check_machine,
}
ROUTER: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "configuration": lambda repository, target: config_checks.check_config(
        repository.router, target
    ),
    "versions": lambda repository, target: config_checks.check_versions(repository.router, target),
    "fields": repository_checks.check_fields,
    "content": repository_checks.check_content,
    "router": repository_checks.check_router,
    "routes": repository_checks.check_routes,
}
# The checks of the runtime come after these.
MODEL: dict[str, ModelCheck] = {
    "configuration": config_checks.check_config,
    "versions": config_checks.check_versions,
    "fields": config_checks.check_fields,
    "content": config_checks.check_content,
    "instances": config_checks.check_instances,
    "manifest": model_checks.check_manifest,
    "labels": config_checks.check_labels,
    "sample": model_checks.check_sample,
    "warm-up": model_checks.check_warmup,
}
LAST: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "memory": repository_checks.check_memory
}
# Checks that load nothing: `deploy` applies them to what it has written.
RULES = ("configuration", "versions", "fields", "content", "labels", "sample", "warm-up")


def steps(
    repository: Repository, target: Target, unloadable: frozenset[str] = frozenset()
) -> list[tuple[str, str, Callable[[], Finding]]]:
    """Return every check with its model's name, in the order in which to make them.

    Models named in `unloadable` are not loaded: their library has already killed a process.
    """
    steps: list[tuple[str, str, Callable[[], Finding]]] = []
    odd = _odd(repository.folder)

    def blocked() -> Iterator[str]:
        # Reading a pipe would wait forever, and following a link would load foreign files.
        raise NotChecked(f"{odd} is not a regular file of the repository")

    def unloaded() -> Iterator[str]:
        raise NotChecked("its library of ops cannot be loaded")

    def add(check: str, model: str, run: Callable[[], Iterator[str]]) -> None:
        own = run if odd is None or check == "files" else blocked
        steps.append((check, model, lambda: _finding(check, model, own)))

    for check, verb in REPOSITORY.items():
        add(check, "", partial(verb, repository, target))
    for check, verb in ROUTER.items():
        add(check, repository.deployment.model, partial(verb, repository, target))
    checks = {**MODEL, **served_runtime(repository.deployment.runtime).checks}
    for one_model in repository.models:
        for check, look in checks.items():
            if check == "answer" and one_model.name in unloadable:
                add(check, one_model.name, unloaded)
            else:
                add(check, one_model.name, partial(look, one_model, target))
    for check, verb in LAST.items():
        add(check, "", partial(verb, repository, target))
    return steps


def broken_rules(folder: Path, target: Target) -> tuple[str, ...]:
    """Return the rules that the files of a repository break, each with its model."""
    repository = open_repository(folder)
    served = served_runtime(repository.deployment.runtime)
    checks, rules = {**MODEL, **served.checks}, {*RULES, *served.rules}
    made = [
        _finding(check, model.name, partial(look, model, target))
        for model in repository.models
        for check, look in checks.items()
        if check in rules
    ]
    return tuple(
        f"{finding.model}: {reason}"
        for finding in made
        if finding.verdict == "failed"
        for reason in finding.reasons
    )


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
