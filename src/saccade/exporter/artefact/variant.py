# SPDX-License-Identifier: Apache-2.0
"""A variant: one point on the trade, whose name is its identity in every later stage."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.errors import SaccadeError
from saccade.models.budget import BudgetLike, budget_text
from saccade.models.families import entries

if TYPE_CHECKING:
    from saccade.models.interface import ComputeBudget, Family

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
# Of the files of a variant, first the one that answers a plain request; a family may add some.
ROLES = ("", "image", "encode", "text", "decode", "step")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_BUDGET_NAME = re.compile(r"[a-z0-9]{1,16}")


def known_roles() -> tuple[str, ...]:
    """The usual roles, and behind them those of single families."""
    own = [role for _, entry in entries() for role in entry.roles]
    return tuple(dict.fromkeys((*ROLES, *own)))


def variant_name(model: str, role: str, budget: str, precision: str) -> str:
    """`<model>[-<role>]-<budget>-<precision>`, the stem of every file of that component.

    Raises: SaccadeError for a part of it that no variant can have.
    """
    check_model_name(model)
    if role not in known_roles():
        known = ", ".join(role for role in known_roles() if role)
        raise SaccadeError(f"role {role!r} is not known. Known: {known}, or none.")
    if not _BUDGET_NAME.fullmatch(budget):
        raise SaccadeError(f"budget {budget!r}: expected 1 to 16 characters of a-z and 0-9.")
    if precision not in PRECISIONS:
        raise SaccadeError(f"precision {precision!r} is not known. Known: {', '.join(PRECISIONS)}.")
    return "-".join(part for part in (model, role, budget, precision) if part)


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


def budget_option(label: str, budget: float) -> str:
    """A budget as `--budget` reads it: a fraction exactly, of which the label has four digits."""
    return repr(budget) if re.fullmatch(r"b\d{4}", label) else label


def check_chosen(flag: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Names of one option: all known, each once, at least one.

    Raises: SaccadeError otherwise.
    """
    if unknown := [name for name in given if name not in known]:
        raise SaccadeError(
            f"--{flag} has {unknown[0]!r}, expected some of {', '.join(known)}, "
            f"like {','.join(known[:2])}."
        )
    if not given or len(set(given)) < len(given):
        raise SaccadeError(f"--{flag} is {','.join(given) or 'empty'}, expected each name once.")


def choose_budgets(model: "Family", given: Iterable[BudgetLike]) -> tuple["ComputeBudget", ...]:
    """The budgets to export, largest budget first; the family's own where none is given.

    Raises: SaccadeError for what the family does not know, and for two that are the same.
    """
    chosen = [model.budget(budget_text(text)) for text in given] or list(model.budgets())
    chosen.sort(key=lambda budget: -budget.share)
    for index, budget in enumerate(chosen):
        for other in chosen[:index]:
            if budget.label == other.label:
                raise SaccadeError(
                    f"budgets {other.share:g} and {budget.share:g} would share the name "
                    f"'{budget.label}'. Leave one out of --budget."
                )
            same = budget.unit != "head" and budget.kept == other.kept
            if same:
                raise SaccadeError(
                    f"budgets {other.share:g} and {budget.share:g} both keep {budget.kept} of "
                    f"{budget.total} {budget.unit}: the variants would be the same. Leave one "
                    "out of --budget."
                )
    return tuple(chosen)
