# SPDX-License-Identifier: Apache-2.0
"""The interface of model families to later stages: components, budgets, runtime metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.budget import ComputeBudget
from saccade.models.families import folded

if TYPE_CHECKING:
    from torch import Tensor, nn

    from saccade.models.config_values import ImageFields

Arrays = Mapping[str, np.ndarray]
# (inputs, outputs of the artefact, outputs of the reference) -> how close the invariant is to being
# broken, as a share of what is allowed; above 1 the gate fails.
Invariant = Callable[[Arrays, Arrays, Arrays], float]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, the meaning of its axes, its type."""

    name: str
    axes: str  # "b 8 8 1": a word is dynamic, a number is fixed; the first is always b, the batch
    dtype: str

    @property
    def shape(self) -> tuple[int | str, ...]:
        """The axes; fixed ones are numbers."""
        return tuple(int(axis) if axis.isdigit() else axis for axis in self.axes.split())


def image_spec(config: "ImageFields") -> TensorSpec:
    """Return the specification of the image that a configuration describes."""
    return TensorSpec("image", f"b {config.height_px} {config.width_px} {config.channels}", "uint8")


@dataclass(frozen=True)
class Component:
    """One function of a model, exported as one file.

    `run` takes tensors by the names in `inputs` and returns named tensors, each with the batch
    as its first axis: always those of `outputs`, and those of `optional` too.
    """

    role: str  # empty if it answers requests alone; else image, text, decode, ...
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    run: "Callable[..., dict[str, Tensor]]"
    optional: tuple[str, ...] = ()  # exported only if `--outputs` names them
    # Checkpoint's calibration arrays -> inputs; None: the arrays with the inputs' names.
    real: Callable[[Arrays], dict[str, np.ndarray]] | None = None
    # Seeded random inputs, this many samples; None: random bytes, floats from N(0, 1).
    random: Callable[[np.random.Generator, int], dict[str, np.ndarray]] | None = None
    # Outputs and calibration arrays of the same samples -> share of right answers in [0, 1], NaN if
    # there are no right answers; None: top-1 accuracy if there are logits and labels.
    score: Callable[[Arrays, Arrays], float] | None = None
    invariants: Mapping[str, Invariant] = field(default_factory=dict)  # by name (lower case, _)
    # The same function at every budget: it is traced and checked at one of them.
    every_budget: bool = False
    # Why many samples can be sensitive to rounding, and what to change in the model or the export.
    remedy: str = ""

    def samples(self, arrays: Arrays) -> Arrays:
        """Return the inputs, among others, that come from a checkpoint's calibration arrays."""
        return self.real(arrays) if self.real else arrays

    def missing(self, real: Arrays) -> list[str]:
        """Return the inputs that `samples` lack, without which an export is refused."""
        return [spec.name for spec in self.inputs if spec.name not in real]


class Family:
    """The methods of a family's model (also an nn.Module) and of its folded form.

    A folded form needs only `components`. The budgets are those of the configuration, which can be
    read without torch. The other defaults suit a family whose budgets leave nothing out.
    """

    # A frozen dataclass with `to_dict`, `from_dict` (unknown field: SaccadeError) and checks in
    # `__post_init__`; `config` is an instance of it.
    config_class: Any
    config: Any
    # Classes of the repeated layers whose activations training may compute again.
    repeated_blocks: "tuple[type[nn.Module], ...]" = ()

    def parameter_layers(self) -> tuple[tuple[str, ...], ...]:
        """Return the beginnings of parameter names by layer, from the input to the output.

        Parameters of no layer belong to the last. It is empty for a model without layers.
        """
        return ()

    def components(self) -> tuple[Component, ...]:
        """Return its components, first the one that answers a plain request."""
        raise NotImplementedError

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return the default variants, largest first, from the configuration."""
        chosen: tuple[ComputeBudget, ...] = self.config.budgets()
        return chosen

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget that a user's text means.

        Raises: SaccadeError listing what is accepted.
        """
        chosen: ComputeBudget = self.config.budget(text)
        return chosen

    def at(self, budget: ComputeBudget) -> "Family":
        """Return the unfolded model at that budget: the same type, weights copied or shared."""
        return self

    def fold(self) -> "nn.Module":
        """Fold constants: the same function, for evaluation only; it has `components` too."""
        return folded(self)  # type: ignore[arg-type]

    def runtime_metadata(self) -> dict[str, Any]:
        """Return what the server and the client need as JSON, such as a vocabulary."""
        raise NotImplementedError


def component_named(model: Any, role: str) -> Component:
    """Return the component with that role.

    Raises: SaccadeError if the model has none.
    """
    components = {component.role: component for component in model.components()}
    if role not in components:
        roles = ", ".join(repr(role) for role in components)
        raise SaccadeError(f"component {role!r}: this model has {roles}. Choose one of them.")
    return components[role]
