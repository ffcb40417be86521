# SPDX-License-Identifier: Apache-2.0
"""Training of a NAC on any data: module dropout, graph prior, scores by budget."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.models.budget import Budget
from saccade.models.families import new_model
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.training.options import TrainOptions, chosen_config
from saccade.models.training.task import Recipe, Task

Arguments = Sequence[np.ndarray | None]  # of the model, [n ...] each, without those it lacks
SMALL_BUDGET = 0.125  # the best step has the best mean of full and small model


class CircuitTask(Task):
    """A `training.task.Task` of a NAC, whose recipe has the `extra` fields of `recipes.CIRCUIT`.

    With module dropout, a step keeps a share of the modules that is drawn as `dropout_draw` says.
    In `dropout_ordered` of the steps they are the best connected ones, else a random subset.
    """

    family = "nac"
    undivided: tuple[str, ...] = ("modules",)
    model: NAC
    scored: tuple[Arguments, np.ndarray]  # validation inputs, and their labels
    ranked: Arguments  # inputs for the modules' order, if it depends on them
    at_once: int  # samples per scoring pass

    def __init__(
        self,
        options: TrainOptions,
        recipe: Recipe,
        given: Mapping[str, Any],
        known: Sequence[str],
    ) -> None:
        self.recipe, self.extra = recipe, recipe.extra
        config = chosen_config(NACConfig, options, recipe.config, given, known=known)
        if "module_dropout" not in options.set:
            fewest = self.extra["keep"][0] / config.modules
            config = replace(config, module_dropout=min(1.0, fewest))
        self.model = new_model(NAC, config)

    def modules(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return `modules` [m], those that a step keeps; nothing if it keeps all."""
        kept = drawn_modules(
            self.model.config, rng, most=self.most_modules(step), rank=lambda: self.order(step)
        )
        return {} if kept is None else {"modules": kept}

    def most_modules(self, step: int) -> int:
        """Return the most modules that a step with module dropout keeps."""
        return int(self.extra["keep"][1])

    def order(self, step: int) -> Tensor:
        """Return the modules, the best connected ones first."""
        return self.model.rank_now().cpu()

    def with_graph_prior(self, loss: Tensor) -> Tensor:
        """Add the links' distance from the prior to the loss."""
        if self.extra["graph_weight"]:
            loss = loss + self.extra["graph_weight"] * self.model.graph_loss()
        return loss

    def validate(self) -> dict[str, float]:
        """Return top-1 of the full and a small model, their mean first."""
        self.rank()
        small = max(SMALL_BUDGET, 1 / self.model.config.modules)
        few = self.extra["validate_count"]
        scores = self.scores(sorted({1.0, small}, reverse=True), most=few)
        return {"mean": (scores["1"] + scores[f"{small:g}"]) / 2} | scores

    def report(self) -> dict[str, float]:
        """Return top-1 by budget on all validation samples."""
        modules = self.model.config.modules
        return self.scores(
            [budget for budget in self.extra["budgets"] if Budget(budget).of(modules)]
        )

    def scores(self, budgets: Sequence[float], *, most: int | None = None) -> dict[str, float]:
        """Return top-1 by budget on the first `most` validation samples."""
        inputs, labels = self.scored
        given = tuple(None if array is None else array[:most] for array in inputs)
        return score(self.model, given, labels[:most], budgets, at_once=self.at_once)

    def finish(self) -> None:
        """Rank the modules: a budget keeps the first ones."""
        if self.auxiliary is not None:
            self.auxiliary.detach()
        self.rank()

    def rank(self) -> Tensor:
        """Rank the modules; if each sample has its own circuit, on training samples."""
        device = self.model.read_out_codes.device
        return self.model.rank_modules(
            *(_tensor(array, slice(None), device) for array in self.ranked)
        )

    def state(self) -> dict[str, Any]:
        """Return the graph prior's permutation."""
        return {"structure": self.model._structure.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.model._structure.restore(state["structure"])


def _tensor(array: np.ndarray | None, part: slice, device: torch.device) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.asarray(array[part])).to(device)


@torch.inference_mode()
def score(
    model: NAC,
    inputs: Arguments,
    labels: np.ndarray,
    budgets: Sequence[float],
    *,
    at_once: int,
) -> dict[str, float]:
    """Return the share of right answers by budget.

    Shapes: inputs the model's arguments, [n ...] each; labels [n].
    Raises: SaccadeError if a budget keeps no module.
    """
    device, scores = model.read_out_codes.device, {}
    for budget in budgets:
        small, right = model.prune(budget).eval().fold(), 0
        for at in range(0, len(labels), at_once):
            part = slice(at, at + at_once)
            given = (_tensor(array, part, device) for array in inputs)
            right += int((small(*given).argmax(1).cpu().numpy() == labels[part]).sum())
        scores[f"{budget:g}"] = right / len(labels)
    return scores


def drawn_modules(
    config: NACConfig, rng: np.random.Generator, *, most: int, rank: Callable[[], Tensor]
) -> Tensor | None:
    """Draw the modules to keep (None: all): from `module_dropout` up to `most` modules.

    In `dropout_ordered` of the steps they are the best connected ones, the first of `rank`, else a
    random subset.

    Shapes: -> int64 [m].
    """
    if config.module_dropout >= 1:
        return None
    least, largest = config.module_dropout, min(1.0, most / config.modules)
    if config.dropout_draw == "uniform":
        share = rng.uniform(least, largest)
    else:
        share = math.exp(rng.uniform(math.log(least), math.log(largest)))
    keep = max(1, math.floor(share * config.modules + 0.5))
    if rng.random() >= config.dropout_ordered:
        return torch.from_numpy(rng.permutation(config.modules)[:keep])
    return rank()[:keep]
