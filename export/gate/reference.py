# SPDX-License-Identifier: Apache-2.0
"""What the gate compares with: the unfolded float64 model's answers, and the folded model."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from saccade.core.errors import require
from saccade.core.machine import return_memory
from saccade.core.progress import Advance, part_of, silent
from saccade.exporter.artefact.manifest import VariantEntry
from saccade.exporter.artefact.variant import budget_option
from saccade.exporter.gate.further_samples import ScoreReference
from saccade.exporter.gate.metrics import perturbed
from saccade.exporter.graph.samples import (
    GateLevel,
    GateSizes,
    Samples,
    further_noise,
    gate_sizes,
    samples_of,
)
from saccade.exporter.runtimes.runners import run_in_batches, torch_runner
from saccade.models.budget import ComputeBudget
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.calibration import at_budget
from saccade.models.interface import Arrays, Component, Family, component_named

_PERTURBATIONS = 4
_KEPT_PARAMETERS = 2**25  # a larger model is built again rather than kept beside another copy
# An unfolded read-in keeps b x modules x tokens x dim numbers in memory.
_REFERENCE_BATCH, _COSTLY_BATCH = 8, 1
_COSTLY_MULTIPLY_ADDS = 10**9


@dataclass(frozen=True)
class ExpectedAnswers:
    """The gate's samples for one component, and the reference's answers to them.

    Shapes: each answer [n ...] float64, in the order of the samples.
    """

    component: Component
    samples: Samples
    answers: dict[str, np.ndarray]
    # inputs by name -> several runs of the unfolded model in float32, on demand
    float32_answers: Callable[[Arrays], Iterable[dict[str, np.ndarray]]]
    # for types narrower than float32; None: no further samples
    scored: ScoreReference | None = None


class Reference:
    """The reference for a checkpoint's artefacts: its model, unfolded, in float64.

    Raises: SaccadeError for an unknown level of the gate.
    """

    def __init__(self, checkpoint: Checkpoint, gate: GateLevel | GateSizes = "standard") -> None:
        self.checkpoint, self._gate = checkpoint, gate
        self.sizes(0)  # refuses an unknown level before anything is read
        self._model: Family | None = None
        self._last: tuple[Any, ExpectedAnswers] | None = None
        self._sized: dict[int | None, Checkpoint] = {}  # the last one
        self._at_every_budget: dict[Any, ExpectedAnswers] = {}

    @property
    def model(self) -> Family:
        """The whole model; it is kept until `release`."""
        if self._model is None:
            torch = require("torch", extra="export")
            self._model = cast(Family, self.checkpoint.build(torch.float64))
        return self._model

    def release(self) -> None:
        """Give back the memory of a large model; it is built again when it is needed."""
        numbers = sum(weight.numel() for weight in self.checkpoint.weights.values())
        if numbers > _KEPT_PARAMETERS:
            self._model = None
            return_memory()

    def sizes(self, multiply_adds: int) -> GateSizes:
        """Return the sizes of the gate for a component of this cost per sample."""
        gate = self._gate
        return gate if isinstance(gate, GateSizes) else gate_sizes(gate, multiply_adds)

    def budget(self, entry: VariantEntry) -> ComputeBudget:
        """Return the budget of a manifest, as the model itself counts it.

        Raises: SaccadeError if the model has no such budget.
        """
        budget = self._plain.budget(budget_option(entry.setting, entry.budget))
        # Older releases counted in floats and kept 31 of 45 at 0.7, where half a module rounds up.
        if entry.kept == math.floor(float(entry.budget) * entry.total + 0.5):
            return replace(budget, kept=entry.kept)
        return budget

    def runtime_metadata(self, budget: ComputeBudget) -> dict[str, Any]:
        """Return what the model at a budget says about itself to a server."""
        return self._plain.at(budget).runtime_metadata()

    def sized(self, budget: ComputeBudget) -> Checkpoint:
        """Return the checkpoint with the preprocessing and samples of a variant's images."""
        height = budget.kept if budget.part else None
        if height not in self._sized:
            self._sized = {height: at_budget(self.checkpoint, budget)}
        return self._sized[height]

    @cached_property
    def _plain(self) -> Family:
        """The model for questions that need no float64; it shares the checkpoint's memory."""
        require("torch", extra="export")
        return cast(Family, self.checkpoint.build())

    def variant(self, budget: ComputeBudget) -> Family:
        """Return the model at a budget, unfolded, in float64."""
        return self.model.at(budget)

    def folded(self, budget: ComputeBudget) -> Any:
        """Return the model that is exported: folded in float64, then rounded to float32 once."""
        self.release()
        torch = require("torch", extra="export")
        model = cast(Family, self.checkpoint.build(torch.float64))
        if any(weight.dtype == torch.float64 for weight in self.checkpoint.weights.values()):
            model = deepcopy(model)  # it shares those with the checkpoint
        model = model.at(budget)
        self.release()  # the whole model, with which the variant may share its weights
        folded = folded_float32(model)
        self.release()
        return folded

    def expected(
        self,
        budget: ComputeBudget,
        role: str,
        outputs: Sequence[str],
        multiply_adds: int,
        advance: Advance = silent,
    ) -> ExpectedAnswers:
        """Run the unfolded float64 model on the gate's samples; this is one step of progress.

        The last answers are kept: they serve every precision of a component. Those of a component
        that is the same at every budget serve all budgets.
        """
        asked = budget, role, outputs, multiply_adds, advance
        key = role, tuple(outputs), self.sizes(multiply_adds)
        if component_named(self._plain, role).every_budget:
            if key not in self._at_every_budget:
                self._at_every_budget[key] = self._answered(*asked)
            return self._at_every_budget[key]
        if self._last is None or self._last[0] != (budget, key):
            self._last = (budget, key), self._answered(*asked)
        return self._last[1]

    def _answered(
        self,
        budget: ComputeBudget,
        role: str,
        outputs: Sequence[str],
        multiply_adds: int,
        advance: Advance,
    ) -> ExpectedAnswers:
        variant = self.variant(budget)
        component = component_named(variant, role)
        checkpoint = self.sized(budget)
        samples = samples_of(checkpoint, component, self.sizes(multiply_adds))
        batch = _COSTLY_BATCH if multiply_adds > _COSTLY_MULTIPLY_ADDS else _REFERENCE_BATCH
        done = part_of(advance, 1, len(samples), "reference in float64")
        run = torch_runner(variant, role, outputs)
        answers = run_in_batches(run, samples.inputs, batch, done=done)
        in_float32 = partial(self._float32_answers, budget, role, outputs, batch)
        component = unbound(component)
        seen = samples.sizes.random_inputs
        scored = ScoreReference(
            checkpoint,
            component,
            lambda: torch_runner(self.folded(budget), role, outputs),
            lambda: further_noise(checkpoint, component, seen),
        )
        return ExpectedAnswers(component, samples, answers, in_float32, scored)

    def _float32_answers(
        self, budget: ComputeBudget, role: str, outputs: Sequence[str], batch: int, inputs: Arrays
    ) -> Iterator[dict[str, np.ndarray]]:
        """Run the unfolded model in float32: once as it is, then with perturbed weights.

        If a rounding decides the answer to a row, a single run would depend on chance.
        """
        self.release()
        torch = require("torch", extra="export")
        variant = cast(Family, self.checkpoint.build(torch.float32)).at(budget)

        def answers(model: Any) -> dict[str, np.ndarray]:
            return run_in_batches(torch_runner(model, role, outputs), inputs, batch)

        yield answers(variant)
        for seed in range(_PERTURBATIONS):
            yield answers(perturbed(variant, seed))


def folded_float32(variant: Family) -> Any:
    """Fold in float64, the same way on every CPU, then round once: the model that is exported.

    The argument must not be used afterwards: folding changes its weights.
    """
    from saccade.models.families import fold_in_place
    from saccade.models.fixed_order import FixedOrder

    with FixedOrder():
        folded: Any = fold_in_place(cast(Any, variant))
    return folded.float()


def unbound(component: Component) -> Component:
    """Return a component without its function, which keeps the model in memory."""
    return replace(component, run=_released)


def _released(**_: Any) -> dict[str, Any]:
    raise AssertionError("the component has no model any more")
