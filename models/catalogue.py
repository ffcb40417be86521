# SPDX-License-Identifier: Apache-2.0
"""The table of every family and named size that `saccade models` prints."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError, require
from saccade.core.schema import typed
from saccade.models.entry import imported
from saccade.models.families import FAMILIES, entry_of, outline
from saccade.models.interface import Component

if TYPE_CHECKING:
    from torch import nn

# What takes a size's model to find out; written by benchmarks/models_cost.py.
KNOWN = Path(__file__).with_name("catalogue.json")
_READ_WHILE_LISTING = 100_000  # largest tensor (in numbers) that a description may read


@dataclass(frozen=True)
class CatalogueRow:
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


def known_sizes() -> dict[str, dict[str, Any]]:
    """Return, by family and size, the recorded parameters, multiply-adds, tensors and budgets."""
    known: dict[str, dict[str, Any]] = json.loads(KNOWN.read_bytes()) if KNOWN.exists() else {}
    return known


def list_models(family: str | None = None) -> list[CatalogueRow]:
    """Return a row per named size of one family or of all; no weights are created.

    Torch is needed only for sizes that are not in `known_sizes`.

    Raises: SaccadeError if there is no such family.
    """
    chosen = list(FAMILIES) if family is None else [family]
    known = known_sizes()
    return [
        _known_row(each, name, known[each][name])
        if name in known.get(each, {})
        else row(each, name)
        for each in chosen
        for name in presets(each)
    ]


def _known_row(family: str, name: str, known: dict[str, Any]) -> CatalogueRow:
    beside = {"family": family, "name": name, "source": imported(entry_of(family).source)}
    recorded: CatalogueRow = typed(CatalogueRow, known | beside, f"{KNOWN}: ")
    return recorded


def row(family: str, name: str, multiply_adds: Mapping[str, int] | None = None) -> CatalogueRow:
    """Return the table row of one size, from an outline of its model.

    Raises: SaccadeError if there is no such family or size, MissingPackage without torch.
    """
    require("torch", extra="export")
    model: Any = _outline(family, preset_of(family, name))
    components: tuple[Component, ...] = model.components()
    budgets = model.budgets()
    return CatalogueRow(
        family=family,
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        multiply_adds=dict(multiply_adds or {}),
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
