# SPDX-License-Identifier: Apache-2.0
"""All checks in their order: of the repository as a whole, then of each model."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from saccade.errors import MissingPackage, SaccadeError
from saccade.serving.repository.files import entries
from saccade.serving.repository.preflight import (
    answer_checks,
    config_checks,
    file_checks,
    machine_checks,
    model_checks,
    router_checks,
)
from saccade.serving.repository.preflight.report import Finding, NotChecked
from saccade.serving.repository.preflight.repository import Repository, open_repository
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.runtimes.served_runtime import ModelCheck

MOST_REASONS = 5  # of one check and model: more of the same kind say nothing new
REPOSITORY: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "files": file_checks.check_files,
    "models": file_checks.check_models,
    "top": file_checks.check_top,
    "machine": machine_checks.check_machine,
}
ROUTER: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "configuration": lambda repository, target: config_checks.check_config(
        repository.router, target
    ),
    "versions": lambda repository, target: config_checks.check_versions(repository.router, target),
    "fields": router_checks.check_fields,
    "content": router_checks.check_content,
    "router": router_checks.check_router,
    "routes": router_checks.check_routes,
}
# A runtime's own come behind them.
MODEL: dict[str, ModelCheck] = {
    "configuration": config_checks.check_config,
    "versions": config_checks.check_versions,
    "fields": config_checks.check_fields,
    "content": config_checks.check_content,
    "instances": config_checks.check_instances,
    "manifest": model_checks.check_manifest,
    "labels": config_checks.check_labels,
    "sample": answer_checks.check_sample,
    "warm-up": answer_checks.check_warmup,
}
LAST: dict[str, Callable[[Repository, Target], Iterator[str]]] = {
    "memory": machine_checks.check_memory
}
# What can be said of a repository without loading anything: `deploy` holds its own work to them.
RULES = ("configuration", "versions", "fields", "content", "labels", "sample", "warm-up")


def steps(
    repository: Repository, target: Target, unloadable: frozenset[str] = frozenset()
) -> list[tuple[str, str, Callable[[], Finding]]]:
    """Every check with the model that it is of, to be made in this order.

    Models that are `unloadable` are not loaded: their library has ended a process before.
    """
    steps: list[tuple[str, str, Callable[[], Finding]]] = []
    odd = _odd(repository.folder)

    def blocked() -> Iterator[str]:
        # Who reads a pipe waits for ever, and who follows a link reads and loads another's files.
        raise NotChecked(f"{odd} is not a file of the repository")

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
    """Rules that a repository breaks by its files alone, each with its model."""
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
    """The first entry that must not be opened; None where all are files that can be read."""
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
        # What a check of the files names too; here it must not end the other checks.
        reasons.append(f"{error.filename or 'a file'} cannot be read ({error.strerror}).")
    except (
        KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        reasons.append(f"what is there is not of the form that saccade writes ({error!r:.200}).")
    return Finding(check, model, "failed" if reasons else "passed", tuple(reasons))
