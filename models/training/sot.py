# SPDX-License-Identifier: Apache-2.0
"""How a second-order transformer learns to classify images, whatever its head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.models.interface import Setting
from saccade.models.preprocessing import Preprocessing
from saccade.models.sot import SoT, SoTConfig
from saccade.models.sot_config import SMALL
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.sot_images import ImageSource, image_source
from saccade.models.training.task import Recipe

CALIBRATION, VALIDATION = 256, 1000
_BATCH = 100  # images of one pass in validation
QUICK = Recipe(steps=1200, batch=64, learning_rate=1e-3, config=SMALL)
SHIPPED = Recipe(
    steps=3_000, batch=64, learning_rate=1e-3, config=SMALL, warm_up_steps=200, ema=0.999
)


def task(options: TrainOptions) -> "SoTTask":
    """A SoT on shapes (the default: one object, its colour and shape), digits, or own images.

    Every head learns by the same recipe: `--set fusion=class` is the baseline.
    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
    source = image_source(options, validation=VALIDATION, calibration=CALIBRATION)
    return SoTTask(options, recipe, source)


class SoTTask:
    """A `training.task.Task`: cross entropy, of both classifiers with late fusion."""

    family = "sot"

    def __init__(self, options: TrainOptions, recipe: Recipe, source: ImageSource) -> None:
        config = chosen_config(SoTConfig, options, recipe.config, source.fields())
        self.recipe, self.source = recipe, source
        self.data, self.data_sha256 = source.name, source.sha256
        self.card = {"validation_images": len(source.validation[1])}
        self.model = SoT(config)

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Images [b h w c] uint8 and labels [b]."""
        images, labels = self.source.draw(rng, self.recipe.batch)
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Cross entropy of the fused logits; with late fusion of each classifier."""
        return self.model.loss(batch["images"], batch["labels"])

    def validate(self) -> dict[str, float]:
        """Top-1 of the model as it is trained."""
        return score(self.model, self.source.validation, self.model.settings()[:1])

    def finish(self) -> None:
        """Nothing is left to do."""

    def report(self) -> dict[str, float]:
        """Top-1 of every head that the model is exported with."""
        return score(self.model, self.source.validation, self.model.settings())

    def saved(self) -> dict[str, Any]:
        """Configuration, input, labels, and 256 training images for calibration."""
        config = self.model.config
        images, labels = self.source.calibration
        return {
            "config": config.to_dict(),
            "preprocessing": Preprocessing(
                config.height_px, config.width_px, config.channels, config.mean, config.std
            ),
            "labels": self.source.class_names,
            "calibration": {"image": images, "labels": labels},
        }


@torch.inference_mode()
def score(
    model: SoT, data: tuple[np.ndarray, np.ndarray], settings: Sequence[Setting]
) -> dict[str, float]:
    """Share of right answers by setting.

    Shapes: data images [n h w c] uint8 and labels [n] int64.
    """
    device = next(model.parameters()).device
    images, labels = (torch.from_numpy(each).to(device) for each in data)
    scores = {}
    for setting in settings:
        chosen = model.at(setting).eval()
        right = sum(
            int((chosen(images[at : at + _BATCH]).argmax(1) == labels[at : at + _BATCH]).sum())
            for at in range(0, len(labels), _BATCH)
        )
        scores[setting.label] = right / len(labels)
    return scores
