# SPDX-License-Identifier: Apache-2.0
"""One optimiser step after the other: schedule, module dropout, losses."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac import NAC
from saccade.models.training_batches import Batch
from saccade.models.training_losses import Auxiliary
from saccade.models.training_recipes import Recipe

_ORDER_STEPS = 20  # steps from one ranking of the modules to the next
_MAX_GRADIENT_NORM = 1.0
_WITHOUT_DECAY = ("codes", "signatures", "position", "norm", "alpha", "bias")


class Trainer:
    """AdamW whose learning rate rises, stays and falls; module dropout skips the dropped rows.

    With module dropout a step keeps a share of the modules that is drawn as `dropout_draw` says,
    from the configuration's smallest to the recipe's largest (in the last `whole_share` of the
    steps: to all). They are the best connected ones in `dropout_ordered` of the steps, else a
    random subset.
    """

    def __init__(
        self, model: NAC, recipe: Recipe, *, total_steps: int, rng: np.random.Generator
    ) -> None:
        self.model, self.recipe, self.rng = model, recipe, rng
        self.total_steps, self.done = total_steps, 0
        self.auxiliary = Auxiliary(model) if recipe.counts_weight else None
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True
        )

    def step(self, batch: Batch) -> float:
        """One step; returns the loss."""
        self._schedule()
        self.model.train()
        logits = self.model(batch.images, modules=self._modules())
        smoothing = self.recipe.label_smoothing
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
        if self.auxiliary is not None and batch.counts is not None:
            loss = loss + self.recipe.counts_weight * self.auxiliary.loss(batch.counts)
        if self.recipe.graph_weight:
            loss = loss + self.recipe.graph_weight * self.model.graph_loss()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.done += 1
        return loss.item()

    def close(self) -> None:
        """Leave the model as it was but for its weights."""
        if self.auxiliary is not None:
            self.auxiliary.detach()

    def _groups(self) -> list[dict[str, object]]:
        named = list(self.model.named_parameters())
        if self.auxiliary is not None:
            named += list(self.auxiliary.named_parameters())
        free = [p for name, p in named if any(part in name for part in _WITHOUT_DECAY)]
        bound = [p for name, p in named if not any(part in name for part in _WITHOUT_DECAY)]
        return [
            {"params": bound, "weight_decay": self.recipe.weight_decay},
            {"params": free, "weight_decay": 0.0},
        ]

    def _schedule(self) -> None:
        warm = min(1.0, (self.done + 1) / self.recipe.warm_up_steps)
        falling = self.recipe.decay_share * self.total_steps
        rate = self.recipe.learning_rate * min(warm, (self.total_steps - self.done) / falling, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _modules(self) -> Tensor | None:
        config, total = self.model.config, self.model.config.modules
        whole = self.done >= (1 - self.recipe.whole_share) * self.total_steps
        if config.module_dropout >= 1:
            return None
        most = 1.0 if whole else min(1.0, self.recipe.keep[1] / total)
        if config.dropout_draw == "uniform":
            share = self.rng.uniform(config.module_dropout, most)
        else:
            share = math.exp(self.rng.uniform(math.log(config.module_dropout), math.log(most)))
        keep = max(1, math.floor(share * total + 0.5))
        if self.rng.random() >= config.dropout_ordered:
            return torch.from_numpy(self.rng.permutation(total)[:keep])
        if self.done % _ORDER_STEPS == 0 or not hasattr(self, "_order"):
            self._order = self.model.rank_modules().clone()
        return self._order[:keep]
