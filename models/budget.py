# SPDX-License-Identifier: Apache-2.0
"""Budgets: the fraction of a model that a variant keeps, exact from option to manifest."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from saccade.core.errors import SaccadeError

# What a user or a request may pass: a number, or a string: 0.5, 2/3, or the name of a budget.
BudgetLike = float | Fraction | str
# The float identifies every fraction up to this denominator, including decimals of six digits.
_MOST = 10**6
_LABEL = re.compile(r"b[0-9]{4}")
_RATIO = re.compile(r"\s*([0-9]{1,9})\s*/\s*([1-9][0-9]{0,8})\s*")


def number(value: BudgetLike) -> float:
    """Return the float nearest to a number or a string, which may be a fraction such as 2/3.

    Raises: ValueError if it is not a number.
    """
    ratio = _RATIO.fullmatch(value) if isinstance(value, str) else None
    try:
        return int(ratio[1]) / int(ratio[2]) if ratio else float(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def budget_text(value: BudgetLike) -> str:
    """Return the exact text of a budget: 3, 0.5, 0.6666666666666666.

    Raises: SaccadeError if it is neither a string nor a number.
    """
    if isinstance(value, str):
        return value.strip()
    try:
        exact = number(value)
    except ValueError as error:
        raise _no_number(value) from error
    short = f"{exact:g}"  # six digits: 3 rounds are not 3.0
    return short if float(short) == exact else repr(exact)


class Budget(float):
    """A fraction of a model, stored as the nearest float: 2/3 is 0.6666666666666666.

    Units: above 0 and at most 1.
    Raises: SaccadeError for any other number, and for anything that is not a number.
    """

    __slots__ = ()

    def __new__(cls, value: BudgetLike) -> "Budget":
        """Create a budget from a number, or from a string such as 0.5 or 2/3."""
        try:
            budget = number(value)
        except ValueError as error:
            raise _no_number(value) from error
        if not 0 < budget <= 1:
            raise SaccadeError(
                f"budget {budget:g} is out of range. A budget is the fraction of the model to "
                "keep: above 0 and at most 1."
            )
        return super().__new__(cls, budget)

    @property
    def fraction(self) -> Fraction:
        """The simplest fraction with this float value: 2/3, and 7/10 for 0.7."""
        simplest = Fraction(self).limit_denominator(_MOST)
        return simplest if float(simplest) == self else Fraction(self)

    @property
    def label(self) -> str:
        """The budget in thousandths with four digits, as used in names of variants: b0667."""
        return f"b{round(1000 * float(self)):04d}"

    def of(self, total: int) -> int:
        """Return how many of `total` are kept, rounding halves up: floor(b total + 1/2)."""
        return math.floor(self.fraction * total + Fraction(1, 2))


@dataclass(frozen=True)
class ComputeBudget:
    """One step of a family's budget scale: what its variants differ in.

    Units: share is 1 for the whole model; a request's `budget` is compared with it.
    """

    label: str  # in the variant's name: b0250, k16, t3, exact, r160
    share: Budget
    kept: int
    total: int
    unit: str  # modules, links, slots, rounds, head, pixels per side
    part: "ComputeBudget | None" = None  # of a resolution: the budget of the model at that size

    def same_as(self, other: "ComputeBudget") -> bool:
        """Return whether variants of both budgets are the same function."""
        one, two = (budget.part or budget for budget in (self, other))
        kept = [(budget.kept, budget.total, budget.unit) for budget in (one, two)]
        same = one.label == two.label or (one.unit != "head" and kept[0] == kept[1])
        return same and self.scale == other.scale

    @property
    def scale(self) -> Fraction:
        """The side of the images as a fraction of the model's own."""
        return Fraction(self.kept, self.total) if self.part else Fraction(1)


def fraction_budget(text: str, total: int, unit: str) -> ComputeBudget:
    """Return the budget that keeps a fraction of `total`, at least one; halves are rounded up.

    Labels are read, too: b0250 is 0.25.

    Raises: SaccadeError if it is not a fraction in (0, 1] or keeps nothing.
    """
    budget = Budget(f"{text[1:]}/1000" if _LABEL.fullmatch(text) else text)
    if budget.label == "b0000":
        raise SaccadeError(
            f"budget {budget:g} is too small: names of variants give it in thousandths. The "
            "smallest is 0.001."
        )
    if (kept := budget.of(total)) == 0:
        raise SaccadeError(
            f"budget {budget:g} keeps none of {total} {unit}. "
            f"The smallest that keeps one is 1/{2 * total}."
        )
    return ComputeBudget(budget.label, budget, kept, total, unit)


def _no_number(value: object) -> SaccadeError:
    return SaccadeError(
        f"budget {value!r:.60} is not a number. Pass fractions in (0, 1], such as "
        "--budget 1,2/3,0.25."
    )
