# SPDX-License-Identifier: Apache-2.0
"""AdamW as every family uses it: which weights decay, how the rate goes, the averaged weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saccade.models.training.task import Recipe

SCHEDULES = ("cosine", "trapezoid")


def adamw(recipe: Recipe, named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """Matrices decay; vectors, and what the recipe names, do not."""
    used = [(name, each) for name, each in named if each.requires_grad]
    free = [each for name, each in used if _is_free(name, each, recipe)]
    bound = [each for name, each in used if not _is_free(name, each, recipe)]
    groups = [
        {"params": bound, "weight_decay": recipe.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def _is_free(name: str, each: Tensor, recipe: Recipe) -> bool:
    return each.dim() < 2 or any(part in name for part in recipe.without_decay)


def rate_at(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, counted from 0: up, then level and down, or a half cosine."""
    warm = min(1.0, (step + 1) / max(1, recipe.warm_up_steps))
    left = recipe.steps - step
    if recipe.schedule == "trapezoid":
        falling = recipe.decay_share * recipe.steps
        return recipe.learning_rate * min(warm, left / falling if falling else 1.0, 1.0)
    behind = max(0, step - recipe.warm_up_steps) / max(1, recipe.steps - recipe.warm_up_steps)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * behind))


class Average:
    """Exponential moving average of the parameters, which starts as a plain mean of the first."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self._named = dict(model.named_parameters())
        self.weights = {name: each.detach().clone() for name, each in self._named.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the parameters of now."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, mean in self.weights.items():
            mean.lerp_(self._named[name].detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, mean in self.weights.items():
            mine = self._named[name]
            kept = mine.detach().clone()
            mine.copy_(mean)
            mean.copy_(kept)
