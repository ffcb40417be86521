# SPDX-License-Identifier: Apache-2.0
"""Cross entropy on pictures of stripes."""

import numpy as np
import torch
from fakes.stripes.config import LABELS, StripesConfig
from fakes.stripes.data import sha256_of, stripes
from fakes.stripes.model import Stripes
from torch import Tensor
from torch.nn import functional as F

from saccade.models.families import new_model
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.task import Recipe, Task

RECIPE = Recipe(steps=40, batch=32, learning_rate=0.02, warm_up_steps=4, validate_every=20)


def task(options: TrainOptions) -> "StripesTask":
    """A model of stripes on pictures of its own."""
    return StripesTask(options)


class StripesTask(Task):
    """A `training.task.Task`."""

    family, data, labels = "stripes", "stripes", LABELS

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=RECIPE, shipped=RECIPE)
        self.model = new_model(Stripes, chosen_config(StripesConfig, options))
        self.training, self.validation = stripes("train", 512), stripes("validation", 128)
        self.data_sha256 = {"train": sha256_of(self.training[0])}

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        rows = rng.integers(0, len(self.training[0]), self.recipe.batch)
        return {"image": torch.from_numpy(self.training[0][rows]),
                "labels": torch.from_numpy(self.training[1][rows])}  # fmt: skip

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        sign = torch.ones(len(batch["image"]), 1)
        return F.cross_entropy(self.model(batch["image"], sign)["logits"], batch["labels"])

    def validate(self) -> dict[str, float]:
        images, labels = map(torch.from_numpy, self.validation)
        predicted = self.model(images, torch.ones(len(images), 1))["logits"].argmax(1)
        return {"direction": float((predicted == labels).double().mean())}

    def calibration(self) -> dict[str, np.ndarray]:
        images, labels = self.training[0][:256], self.training[1][:256]
        return {"image": images, "labels": labels, "sign": np.ones((256, 1), np.float32)}
