# SPDX-License-Identifier: Apache-2.0
"""The points of a sweep: each budget at each precision."""

from dataclasses import dataclass
from typing import Any

from saccade.exporter.artefact.variant import (
    budget_option,
    choose_budgets,
    default_model_name,
    variant_name,
)
from saccade.models.checkpoint import Checkpoint
from saccade.serving.bench.sweep.options import SweepOptions


@dataclass(frozen=True)
class Point:
    """One variant to make: a budget of the model at a precision."""

    variant: str  # name without a role
    setting: str
    precision: str
    budget: str  # value for `saccade export --budget`


@dataclass(frozen=True)
class Failure:
    """A point that failed, and so is not on the frontier, with the reason."""

    variant: str
    setting: str
    precision: str
    stage: str
    reason: str


def points_of(checkpoint: Checkpoint, options: SweepOptions) -> tuple[Point, ...]:
    """Return the points of a sweep: largest budget first, precisions in the given order.

    Raises: SaccadeError for a budget that the family does not have.
    """
    model: Any = checkpoint.build()
    name = options.name or default_model_name(checkpoint.path)
    return tuple(
        Point(
            variant=variant_name(name, "", budget.label, precision),
            setting=budget.label,
            precision=precision,
            budget=budget_option(budget.label, budget.share),
        )
        for budget in choose_budgets(model, options.budget)
        for precision in options.precision
    )
