# SPDX-License-Identifier: Apache-2.0
"""The table of every family and named size that `saccade models` prints."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError, require
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entry_of, outline
from saccade.models.interface import Component
from saccade.spelling import did_you_mean

if TYPE_CHECKING:
    from torch import nn

COSTS = Path(__file__).with_name("model_costs.json")  # written by benchmarks/models_cost.py
_READ_WHILE_LISTING = 100_000  # largest tensor (in numbers) that a description may read


@dataclass(frozen=True)
class Row:
    """One named size of a family."""

    family: str
    name: str
    parameters: int
    multiply_adds: dict[str, int]  # of one sample, by role, at the first budget
    inputs: dict[str, tuple[str, ...]]  # by role of the component, "name [axes]"
    outputs: dict[str, tuple[str, ...]]  # by role of the component
    optional: dict[str, tuple[str, ...]]  # exported only if --outputs names them
    settings: tuple[str, ...]  # labels of the variants that an export writes by default
    unit: str  # what a budget keeps
    source: str  # the paper

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def presets(family: str) -> dict[str, Any]:
    """Return a family's configurations by size name.

    Raises: SaccadeError if there is no such family.
    """
    configs: Mapping[str, Any] = imported(entry_of(family).presets)
    return dict(configs)


def preset_of(family: str, name: str) -> Any:
    """Return the configuration of one size of a family.

    Raises: SaccadeError if there is no such family or size.
    """
    sizes = presets(family)
    if name not in sizes:
        raise SaccadeError(
            f"{family} has no size {name!r}.{did_you_mean(name, sizes)} Choose one of: "
            f"{', '.join(sizes)}."
        )
    return sizes[name]


def known_costs() -> dict[str, dict[str, Any]]:
    """Return, by family and size, the parameters and multiply-adds counted in the graphs."""
    costs: dict[str, dict[str, Any]] = json.loads(COSTS.read_bytes()) if COSTS.exists() else {}
    return costs


def catalogue(family: str | None = None) -> list[Row]:
    """Return a row per named size of one family or of all; no weights are created.

    Raises: SaccadeError if there is no such family.
    """
    require("torch", extra="export")
    chosen = list(FAMILIES) if family is None else [family]
    return [row(family, name) for family in chosen for name in presets(family)]


def row(family: str, name: str) -> Row:
    """Return the table row of one size.

    Raises: SaccadeError if there is no such family or size.
    """
    model: Any = _outline(family, preset_of(family, name))
    components: tuple[Component, ...] = model.components()
    budgets = model.budgets()
    return Row(
        family=family,
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=known_costs().get(family, {}).get(name, {}).get("multiply_adds", {}),
        inputs={
            component.role: tuple(f"{spec.name} [{spec.axes}]" for spec in component.inputs)
            for component in components
        },
        outputs={component.role: component.outputs for component in components},
        optional={
            component.role: component.optional for component in components if component.optional
        },
        settings=tuple(budget.label for budget in budgets),
        unit=budgets[0].unit,
        source=imported(entry_of(family).source),
    )


def _outline(family: str, config: Any) -> "nn.Module":
    """Build the model with all shapes but no values: memory that is never touched costs nothing."""
    import torch

    model = outline(family, config.to_dict()).to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.numel() <= _READ_WHILE_LISTING:
                tensor.zero_()
    return model
