# SPDX-License-Identifier: Apache-2.0
"""Interface of every model family to the later stages: components, budgets, runtime metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.budget import Budget
from saccade.models.families import folded

if TYPE_CHECKING:
    from torch import Tensor, nn

Arrays = Mapping[str, np.ndarray]
# The inputs, what the artefact answers, what the reference answers -> how far the invariant is from
# broken, as a share of what is allowed: above 1 the gate fails.
Invariant = Callable[[Arrays, Arrays, Arrays], float]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: what it is called, what its axes mean, what it holds."""

    name: str
    axes: str  # "b 8 8 1": a word is dynamic, a number is fixed; the first is always b, the batch
    dtype: str

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The axes one by one, fixed ones as numbers."""
        return tuple(int(axis) if axis.isdigit() else axis for axis in self.axes.split())


@dataclass(frozen=True)
class ComputeBudget:
    """One point of a family's budget: what its variants differ in.

    Units: budget is 1 for the whole model; a request's `budget` is held against it.
    """

    label: str  # in the variant's name: b0250, t3, exact
    share: Budget
    kept: int
    total: int
    unit: str  # modules, slots, rounds, head


@dataclass(frozen=True)
class Component:
    """One function of a model, exported as one file.

    `run` takes tensors by the names of `inputs` and answers named tensors, each with the batch
    as its first axis: those of `outputs` always, those of `optional` too.
    """

    role: str  # empty for the component that answers requests alone; else image, text, decode, ...
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    run: "Callable[..., dict[str, Tensor]]"
    optional: tuple[str, ...] = ()  # exported where `--outputs` names them
    # Checkpoint's calibration arrays -> inputs; none: the arrays of the inputs' own names.
    real: Callable[[Arrays], dict[str, np.ndarray]] | None = None
    # Seeded random inputs, so many samples; none: bytes at random, floats from N(0, 1).
    random: Callable[[np.random.Generator, int], dict[str, np.ndarray]] | None = None
    # Outputs and calibration arrays of the same samples -> share in [0, 1], NaN without right
    # answers; none: top-1 where there are logits and labels.
    score: Callable[[Arrays, Arrays], float] | None = None
    invariants: Mapping[str, Invariant] = field(default_factory=dict)  # by name, lower case with _


class Family:
    """The methods that a family's model (an nn.Module as well) and its folded form have.

    A folded form needs `components` only. What is the same for a family that a budget leaves
    nothing out of stands here.
    """

    # A frozen dataclass with `to_dict`, `from_dict` (unknown field: SaccadeError) and checks in
    # `__post_init__`; `config` is one of it.
    config_class: Any
    config: Any

    def components(self) -> tuple[Component, ...]:
        """Its files, the one that answers a plain request first."""
        raise NotImplementedError

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """The default variants, largest first: the whole model alone."""
        return (ComputeBudget("b1000", Budget(1), 1, 1, "model"),)

    def budget(self, text: str) -> ComputeBudget:
        """The budget that a user writes: the whole model.

        Raises: SaccadeError naming what is accepted.
        """
        (whole,) = self.budgets()
        if text.strip() not in ("1", "1.0", "whole", whole.label):
            raise SaccadeError(
                f"budget {text!r}: a model of {self.config.called} is exported whole. "
                "Leave --budget out, or say 1."
            )
        return whole

    def at(self, budget: ComputeBudget) -> "Family":
        """The model of that budget, unfolded; the same type, weights copied or shared."""
        return self

    def fold(self) -> "nn.Module":
        """The same function with constants folded; evaluation only, it has `components` too."""
        return folded(self)  # type: ignore[arg-type]

    def runtime_metadata(self) -> dict[str, Any]:
        """JSON that the server and the client need, such as a vocabulary."""
        raise NotImplementedError


def component_named(model: Any, role: str) -> Component:
    """The component of that role.

    Raises: SaccadeError if the model has none.
    """
    components = {component.role: component for component in model.components()}
    if role not in components:
        roles = ", ".join(repr(role) for role in components)
        raise SaccadeError(f"component {role!r}: this model has {roles}. Name one of them.")
    return components[role]


def fraction_budget(text: str, total: int, unit: str) -> ComputeBudget:
    """The budget that keeps a fraction of `total`, half rounded up, never none.

    Raises: SaccadeError if it is not a fraction in (0, 1] or keeps nothing.
    """
    budget = Budget(text)
    if budget.label == "b0000":
        raise SaccadeError(
            f"budget {budget:g} is too small for a name in per mille. The smallest is 0.001."
        )
    if (kept := budget.of(total)) == 0:
        raise SaccadeError(
            f"budget {budget:g} keeps none of {total} {unit}. "
            f"The smallest that keeps one is 1/{2 * total}."
        )
    return ComputeBudget(budget.label, budget, kept, total, unit)
