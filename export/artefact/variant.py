# SPDX-License-Identifier: Apache-2.0
"""Variants: one model at one budget and precision, identified by name in every later stage."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.checks import check_once, check_one_of
from saccade.core.errors import SaccadeError
from saccade.models.budget import BudgetLike, ComputeBudget, budget_text
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.families import config_class, entries

if TYPE_CHECKING:
    from saccade.models.checkpoint import Checkpoint
    from saccade.models.checkpoint_format import Header
    from saccade.models.config_values import ConfigValues
    from saccade.models.interface import Family

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
# Roles of a variant's files; the first answers a plain request. A family may add roles.
ROLES = ("", "image", "encode", "text", "decode", "step")
OF_GROUPS = "multiply-adds"  # unit of the budgets of a group
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_BUDGET_NAME = re.compile(r"[a-z0-9]{1,16}")


def known_roles() -> tuple[str, ...]:
    """Return the common roles, followed by those of single families."""
    own = [role for _, entry in entries() for role in entry.roles]
    return tuple(dict.fromkeys((*ROLES, *own)))


def variant_name(model: str, role: str, budget: str, precision: str) -> str:
    """Return `<model>[-<role>]-<budget>-<precision>`, the stem of the component's file names.

    Raises: SaccadeError for a part that no variant can have.
    """
    check_model_name(model)
    if role:
        check_one_of("role", role, [*filter(None, known_roles())])
    if not _BUDGET_NAME.fullmatch(budget):
        raise SaccadeError(f"budget {budget!r}: expected 1 to 16 characters of a-z and 0-9.")
    check_one_of("precision", precision, PRECISIONS)
    return "-".join(part for part in (model, role, budget, precision) if part)


def check_model_name(name: str, source: str = "") -> str:
    """Return `name` if files and served models can have it; `source` is the file that has it.

    Raises: SaccadeError otherwise.
    """
    if not _NAME.fullmatch(name):
        raise SaccadeError(
            f"{source}{name!r} cannot name a model, expected 1 to 64 characters of a-z, 0-9 and "
            "'-', starting with a letter or digit. Pass another name with --name."
        )
    return name


def default_model_name(checkpoint: Path) -> str:
    """Return the checkpoint's file name without its extension, or its folder's name.

    Raises: SaccadeError if it cannot be a model's name.
    """
    return check_model_name(checkpoint_name(checkpoint), f"{checkpoint}: ")


def budget_option(label: str, budget: float) -> str:
    """Return a budget as `--budget` reads it: an exact fraction (a label has only four digits)."""
    return repr(budget) if re.fullmatch(r"b\d{4}", label) else label


def check_chosen(flag: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Check that an option has at least one name, only known names, and each only once.

    Raises: SaccadeError otherwise.
    """
    for name in given or ("",):
        check_one_of(f"--{flag}", name, known, f"Pass one or more, as in {','.join(known[:2])}.")
    check_once(f"--{flag}", given)


def check_budgets(checkpoint: "Checkpoint | Header", given: Iterable[BudgetLike]) -> None:
    """Check budgets against a checkpoint's configuration, without reading weights.

    Raises: SaccadeError as in `choose_budgets`, or if the configuration is wrong.
    """
    choose_budgets(config_class(checkpoint.family).from_dict(checkpoint.config), given)


def choose_budgets(
    model: "Family | ConfigValues", given: Iterable[BudgetLike]
) -> tuple[ComputeBudget, ...]:
    """Return the budgets to export, largest first; the family's defaults if none is given.

    Raises: SaccadeError for a budget that the family does not have, and for two equal budgets.
    """
    chosen = [model.budget(budget_text(text)) for text in given] or list(model.budgets())
    chosen.sort(key=lambda budget: -budget.share)
    for index, budget in enumerate(chosen):
        for other in chosen[:index]:
            if budget.label == other.label:
                raise SaccadeError(
                    f"budgets {other.share:g} and {budget.share:g} would both be named "
                    f"'{budget.label}'. Leave one out of --budget."
                )
            if budget.same_as(other):
                names = f"{other.share:g} and {budget.share:g}"
                if budget.part or other.part:
                    names = f"'{other.label}' and '{budget.label}'"
                raise SaccadeError(
                    f"budgets {names} both keep {budget.kept} of {budget.total} {budget.unit}: "
                    "the variants would be the same. Leave one out of --budget."
                )
    return tuple(chosen)
