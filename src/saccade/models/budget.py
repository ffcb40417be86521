# SPDX-License-Identifier: Apache-2.0
"""A budget: the fraction of a model that a variant keeps, exact from an option to the manifest."""

import math
import re
from fractions import Fraction

from saccade.errors import SaccadeError

# What a user or a request may say: a number, or as text 0.5, 2/3, or the name of a budget.
BudgetLike = float | Fraction | str
# Fractions up to this denominator, decimals of six digits among them, are told by their float.
_MOST = 10**6
_RATIO = re.compile(r"\s*([0-9]{1,9})\s*/\s*([1-9][0-9]{0,8})\s*")


def number(value: BudgetLike) -> float:
    """The float nearest to a number or its text, which may be a fraction such as 2/3.

    Raises: ValueError for what is not a number.
    """
    ratio = _RATIO.fullmatch(value) if isinstance(value, str) else None
    try:
        return int(ratio[1]) / int(ratio[2]) if ratio else float(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def budget_text(value: BudgetLike) -> str:
    """Text of a budget that says it exactly: 3, 0.5, 0.6666666666666666.

    Raises: SaccadeError for what is neither a text nor a number.
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
    """A fraction of a model, held as the float nearest to it: 2/3 is 0.6666666666666666.

    Units: above 0 and at most 1.
    Raises: SaccadeError for any other number, and for what is none.
    """

    __slots__ = ()

    def __new__(cls, value: BudgetLike) -> "Budget":
        """From a number, or from a text such as 0.5 or 2/3."""
        try:
            budget = number(value)
        except ValueError as error:
            raise _no_number(value) from error
        if not 0 < budget <= 1:
            raise SaccadeError(
                f"budget {budget:g} is out of range: a budget is the fraction of the model that "
                "is kept, larger than 0 and at most 1."
            )
        return super().__new__(cls, budget)

    @property
    def fraction(self) -> Fraction:
        """The simplest fraction that this float stands for: 2/3, and 7/10 for 0.7."""
        simplest = Fraction(self).limit_denominator(_MOST)
        return simplest if float(simplest) == self else Fraction(self)

    @property
    def label(self) -> str:
        """Its per mille in four digits, as names of variants have it: b0667."""
        return f"b{round(1000 * float(self)):04d}"

    def of(self, total: int) -> int:
        """Number of the `total` that are kept, a half rounded up: floor(b total + 1/2)."""
        return math.floor(self.fraction * total + Fraction(1, 2))


def _no_number(value: object) -> SaccadeError:
    return SaccadeError(
        f"budget {value!r:.60} is not a number. Give fractions in (0, 1], such as "
        "--budget 1,2/3,0.25."
    )
