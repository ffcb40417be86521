# SPDX-License-Identifier: Apache-2.0
"""A variant: one point on the trade, whose name is its identity in every later stage."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from saccade.plugins.errors import SaccadeError

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
EXPORTED_PRECISIONS = ("fp32",)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Variant:
    """A model at one budget and one precision.

    Units:  budget is the fraction of modules kept.
    Raises: SaccadeError for a name, budget or precision that no variant can have.
    """

    model: str
    family: str
    budget: float
    precision: str

    def __post_init__(self) -> None:
        check_model_name(self.model)
        _check_budget(self.budget)
        if self.precision not in PRECISIONS:
            raise SaccadeError(
                f"precision {self.precision!r} is not known. Known: {', '.join(PRECISIONS)}; "
                f"exported by this release: {', '.join(EXPORTED_PRECISIONS)}."
            )

    @property
    def name(self) -> str:
        """`<model>-b<budget in per mille>-<precision>`, the stem of every file it owns."""
        return f"{self.model}-b{round(1000 * self.budget):04d}-{self.precision}"


def check_model_name(name: str) -> str:
    """The name itself, if files and served models may carry it.

    Raises: SaccadeError otherwise.
    """
    if not _NAME.fullmatch(name):
        raise SaccadeError(
            f"model name {name!r}: a name is 1 to 64 characters of a-z, 0-9 and '-', and starts "
            "with a letter or digit. Pass another one with --name."
        )
    return name


def default_model_name(checkpoint: Path) -> str:
    """The checkpoint's stem.

    Raises: SaccadeError if the stem cannot be a model's name.
    """
    if not _NAME.fullmatch(checkpoint.stem):
        raise SaccadeError(
            f"{checkpoint}: its stem {checkpoint.stem!r} cannot name a model (1 to 64 characters "
            "of a-z, 0-9 and '-', starting with a letter or digit). Pass a name with --name."
        )
    return checkpoint.stem


def parse_budgets(values: str | Iterable[float | str]) -> tuple[float, ...]:
    """Budgets from `1,0.5,0.25` or numbers, largest first.

    Units:  fractions of the modules, in (0, 1].
    Raises: SaccadeError for anything else, for none, and for the same budget twice.
    """
    parts = values.split(",") if isinstance(values, str) else list(values)
    budgets = []
    for part in parts:
        try:
            budgets.append(float(part))
        except (TypeError, ValueError) as error:
            raise SaccadeError(
                f"budget {part!r} is not a number. Give fractions of the modules in (0, 1], "
                "such as --budget 1,0.5,0.25."
            ) from error
        _check_budget(budgets[-1])
    if not budgets:
        raise SaccadeError("no budget given. Give at least one, such as --budget 1,0.5,0.25.")
    budgets.sort(reverse=True)
    for larger, smaller in pairwise(budgets):
        if round(1000 * larger) == round(1000 * smaller):
            raise SaccadeError(
                f"budgets {larger:g} and {smaller:g} are the same in per mille and would share "
                "a name. Leave one out of --budget."
            )
    return tuple(budgets)


def modules_kept(budget: float, modules: int) -> int:
    """How many of `modules` a budget keeps, half rounded up.

    Raises: SaccadeError if that is none.
    """
    _check_budget(budget)
    kept = math.floor(budget * modules + 0.5)
    if kept == 0:
        raise SaccadeError(
            f"budget {budget:g} keeps none of {modules} modules. "
            f"The smallest that keeps one is {0.5 / modules:.4g}."
        )
    return kept


def choose_variants(
    model: str, family: str, budgets: Iterable[float], precision: str, modules: int
) -> dict[Variant, int]:
    """Each variant with the number of modules it keeps, in the order of the budgets.

    Raises: SaccadeError if two budgets keep the same modules.
    """
    chosen: dict[Variant, int] = {}
    for budget in budgets:
        kept = modules_kept(budget, modules)
        for other, others in chosen.items():
            if others == kept:
                raise SaccadeError(
                    f"budgets {other.budget:g} and {budget:g} both keep {kept} of {modules} "
                    "modules: the variants would be the same. Leave one out of --budget."
                )
        chosen[Variant(model, family, budget, precision)] = kept
    return chosen


def _check_budget(budget: float) -> None:
    if not (math.isfinite(budget) and 0 < budget <= 1):
        raise SaccadeError(
            f"budget {budget:g} is out of range: a budget is the fraction of modules kept, "
            "larger than 0 and at most 1."
        )
    if round(1000 * budget) == 0:
        raise SaccadeError(
            f"budget {budget:g} is too small for a name in per mille. The smallest is 0.001."
        )
