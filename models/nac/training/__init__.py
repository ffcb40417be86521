# SPDX-License-Identifier: Apache-2.0
"""A NAC that learns to classify images: module dropout, graph prior, and a score by budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.models.budget import Budget
from saccade.models.data.datasets import (
    CALIBRATION_SAMPLES,
    Dataset,
    calibration_rows,
    load_data,
    pixel_moments,
)
from saccade.models.families import new_model
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.nac.training.auxiliary import Auxiliary
from saccade.models.nac.training.batches import ImageBatches
from saccade.models.nac.training.dropout import drawn_modules
from saccade.models.nac.training.recipes import SETTABLE, recipe_for, with_epochs, with_extra
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.task import Task

SMALL_BUDGET = 0.125  # the best step is the one whose full and small model are best on average
_ORDER_STEPS = 20  # steps from one ranking of the modules to the next


# Data that no image classifier learns -> the module whose `task` does.
_ELSEWHERE = {"listops": "saccade.models.nac.training.listops"}


def task(options: TrainOptions) -> Task:
    """A NAC on digits (the default), digits-sum, listops, a folder of class folders, or an .npz.

    Of images both recipes are the same: each data set has one.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    data = options.data or "digits"
    if data in _ELSEWHERE:
        other: Task = import_module(_ELSEWHERE[data]).task(options)
        return other
    training = load_data(data, "train", side_px=options.side_px, also=tuple(_ELSEWHERE))
    validation = load_data(data, "validation", side_px=options.side_px)
    return NACTask(options, training, validation)


class NACTask(Task):
    """A `training.task.Task`.

    With module dropout a step keeps a share of the modules that is drawn as `dropout_draw` says,
    from the configuration's smallest to the recipe's largest (in the last `whole_share` of the
    steps: to all). They are the best connected ones in `dropout_ordered` of the steps, else a
    random subset.
    """

    family = "nac"
    model: NAC

    def __init__(self, options: TrainOptions, training: Dataset, validation: Dataset) -> None:
        self.training, self.validation = training, validation
        self.data, self.labels = training.name, training.class_names
        self.data_sha256 = {"train": training.sha256, "validation": validation.sha256}
        self.card = {"validation_images": len(validation.labels)}
        _, height, width, channels = training.images.shape
        recipe = recipe_for(options.data or "digits", height, width)
        recipe = chosen_recipe(options, quick=recipe, shipped=recipe)
        recipe = with_extra(recipe, options.set)
        self.recipe = with_epochs(recipe, len(training.labels), steps=options.steps)
        self.extra: Mapping[str, Any] = self.recipe.extra
        mean, std = pixel_moments(training.images)
        given = {
            "height_px": height,
            "width_px": width,
            "channels": channels,
            "mean": mean,
            "std": std,
            "classes": len(training.class_names),
        }
        config = chosen_config(NACConfig, options, recipe.config, given, known=SETTABLE)
        if "module_dropout" not in options.set:
            fewest = self.extra["keep"][0] / config.modules
            config = replace(config, module_dropout=min(1.0, fewest))
        self.model = new_model(NAC, config)
        self.auxiliary = Auxiliary(self.model) if self.extra["counts_weight"] else None
        self.batches = ImageBatches(self.recipe, training)
        self._order: Tensor | None = None

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Images [b h w c] uint8, labels [b], and `modules` [m] where some are left out."""
        batch = self.batches.at(step, rng)
        modules = self._modules(step, rng)
        return batch if modules is None else batch | {"modules": modules}

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Of the class, the graph prior, and what is on the canvas where that is known."""
        logits = self.model(batch["images"], modules=batch.get("modules")).float()
        smoothing = self.extra["label_smoothing"]
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
        if self.auxiliary is not None:
            loss = loss + self.extra["counts_weight"] * self.auxiliary.loss(batch["counts"])
        if self.extra["graph_weight"]:
            loss = loss + self.extra["graph_weight"] * self.model.graph_loss()
        return loss

    def _modules(self, step: int, rng: np.random.Generator) -> Tensor | None:
        config = self.model.config
        whole = step >= (1 - self.extra["whole_share"]) * self.recipe.steps
        most = config.modules if whole else self.extra["keep"][1]
        return drawn_modules(config, rng, most=most, rank=lambda: self._order_at(step))

    def _order_at(self, step: int) -> Tensor:
        if step % _ORDER_STEPS == 0 or self._order is None:
            self._order = self._rank().cpu().clone()
        return self._order

    def validate(self) -> dict[str, float]:
        """Top-1 of the full and of a small model, and first their mean."""
        self._rank()
        small = max(SMALL_BUDGET, 1 / self.model.config.modules)
        most = self.extra["validate_images"]
        scores = score(self.model, self.validation, sorted({1.0, small}, reverse=True), most=most)
        return {"mean": (scores["1"] + scores[f"{small:g}"]) / 2} | scores

    def finish(self) -> None:
        """Rank the modules: a budget keeps the first of them."""
        if self.auxiliary is not None:
            self.auxiliary.detach()
        self._rank()

    def _rank(self) -> Tensor:
        """The modules' order; where each image has its own circuit, that of training images."""
        device = self.model.read_out_codes.device
        images = torch.from_numpy(self.training.images[:CALIBRATION_SAMPLES])
        return self.model.rank_modules(images.to(device))

    def report(self) -> dict[str, float]:
        """Top-1 by budget on all validation images."""
        modules = self.model.config.modules
        keeping = [each for each in self.extra["budgets"] if Budget(each).of(modules)]
        return score(self.model, self.validation, keeping)

    def calibration(self) -> dict[str, np.ndarray]:
        """256 training images with their labels."""
        chosen = calibration_rows(len(self.training.labels))
        return {"image": self.training.images[chosen], "labels": self.training.labels[chosen]}

    def state(self) -> dict[str, Any]:
        """The batches' order, the modules' order and the graph prior's permutation."""
        return {
            "batches": self.batches.state(),
            "order": self._order,
            "structure": self.model._structure.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.batches.restore(state["batches"])
        self._order = state["order"]
        self.model._structure.restore(state["structure"])


def score(
    model: NAC, data: Dataset, budgets: Sequence[float], *, most: int | None = None
) -> dict[str, float]:
    """Share of right answers by budget, from the first `most` samples.

    Raises: SaccadeError if a budget keeps no module.
    """
    device = model.read_out_codes.device
    images = torch.from_numpy(data.images[:most]).to(device)
    labels = torch.from_numpy(data.labels[:most]).to(device)
    scores = {}
    for budget in budgets:
        small = model.prune(budget).eval().fold()
        with torch.inference_mode():
            right = sum(
                int((small(images[i : i + 50]).argmax(1) == labels[i : i + 50]).sum())
                for i in range(0, len(labels), 50)
            )
        scores[f"{budget:g}"] = right / len(labels)
    return scores
