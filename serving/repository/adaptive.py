# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice in a repository: its objective, its floor, and whether there is a choice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN, Share, typed
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.tasks import tasks_of
from saccade.exporter.policy.policy import policy_files, read_policies
from saccade.models.budget import Budget
from saccade.serving.repository.options import RepositoryOptions, SloMs
from saccade.serving.repository.policies import CHOOSES, ServedPolicy

KEY = "adaptive"  # key in routes.json and in the router's description for clients
_AGAIN = "Write the repository again."
_ROUNDED = 1e-3  # shares in a policy file have six digits


@dataclass(frozen=True)
class ServedAdaptive:
    """The load-adaptive choice in routes.json.

    `shares` are the shares of the calibration's samples that end at each step, by policy.
    """

    slo_ms: SloMs
    floor_budget: Budget | None
    shares: dict[str, tuple[Share, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        content = asdict(self)
        content["floor_budget"] = None if self.floor_budget is None else float(self.floor_budget)
        return {**content, "shares": {name: list(ends) for name, ends in self.shares.items()}}

    def described(self) -> dict[str, Any]:
        """What clients learn from the router's configuration."""
        content = self.to_dict()
        del content["shares"]
        return content


def served_adaptive(
    folder: ArtefactFolder,
    variants: Sequence[VariantFiles],
    policies: Sequence[ServedPolicy],
    options: RepositoryOptions,
    *,
    labelled: bool,
) -> ServedAdaptive | None:
    """Return the load-adaptive choice of a repository; None without `--slo-ms`.

    Raises: SaccadeError if answers of different variants cannot be compared, the floor is not a
        budget, or only one answer is left to choose from.
    """
    if options.slo_ms is None:
        return None
    specs = [spec.name for part in variants[0].components.values() for spec in part.outputs]
    family = variants[0].main.variant.family
    decides = any(task.decide for task in tasks_of(family).values())  # words have logits, too
    if not decides or (CHOOSES not in specs and not labelled):
        raise SaccadeError(
            f"--slo-ms: found a model of family {family}, expected a classifier: other "
            "answers of different variants cannot take each other's place. Drop --slo-ms"
            + (", or pass --labels." if "embedding" in specs else ".")
        )
    floor = None if options.floor_budget is None else _floor(options.floor_budget, variants)
    names = {policy.name for policy in policies}
    shares = {
        policy.name: tuple(step.share for step in policy.steps)
        for path in (policy_files(folder.path) if names else ())
        for policy in read_policies(path).policies
        if policy.name in names
    }
    adaptive = ServedAdaptive(float(options.slo_ms), floor, shares)
    for reason in faults(adaptive, policies, [one.main.variant.budget for one in variants]):
        raise SaccadeError(f"--slo-ms: {reason}")
    return adaptive


def adaptive_of(routes: Mapping[str, Any]) -> ServedAdaptive | None:
    """Return the load-adaptive choice in routes.json; None if there is none.

    Raises: SaccadeError for a missing, unknown or wrong key.
    """
    if KEY not in routes:
        return None
    try:
        found: ServedAdaptive = typed(ServedAdaptive, routes[KEY], f"{KEY}: ")
    except SaccadeError as error:
        raise SaccadeError(str(error).replace(f"{AGAIN}", _AGAIN)) from error
    return found


def faults(
    adaptive: ServedAdaptive, policies: Sequence[ServedPolicy], budgets: Sequence[float]
) -> Iterator[str]:
    """Yield what is wrong with a choice among these policies and budgets, one sentence each."""
    steps = {policy.name: len(policy.steps) for policy in policies}
    if {name: len(ends) for name, ends in adaptive.shares.items()} != steps:
        yield f"expected the shares of each step of {', '.join(steps) or 'no policy'}. {_AGAIN}"
    for name, ends in adaptive.shares.items():
        if abs(sum(ends) - 1) > _ROUNDED:
            yield f"the shares of policy {name} add up to {sum(ends):g}, expected 1. {_AGAIN}"
    floor, largest = adaptive.floor_budget, max(budgets)
    if floor is not None and floor > largest:
        yield (
            f"found --floor-budget {floor:g}, expected at most {largest:g}, the largest budget "
            "of the folder."
        )
    elif not policies and not any((floor or 0.0) <= one < largest for one in budgets):
        above = f" of at least {floor:g} (--floor-budget)" if floor is not None else ""
        yield (
            f"found one budget{above} and no policies, expected something to choose from. Export "
            "more budgets, or calibrate policies with: saccade calibrate FOLDER --data DATA"
        )


def _floor(given: float | str, variants: Sequence[VariantFiles]) -> Budget:
    """Return the floor as a number; a name is that of a budget in the folder."""
    named = {one.main.variant.setting: one.main.variant.budget for one in variants}
    if given in named:
        return Budget(named[str(given)])
    try:
        return Budget(given)
    except SaccadeError as error:
        raise SaccadeError(
            f"--floor-budget is {given!r:.60}, expected a number above 0 and at most 1, or one of "
            f"{', '.join(named)}."
        ) from error
