# SPDX-License-Identifier: Apache-2.0
"""How a second-order transformer learns to classify images or texts, whatever its head."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from saccade.models.families import new_model
from saccade.models.interface import Setting
from saccade.models.sot.config import SMALL
from saccade.models.sot.model import SoT, SoTConfig
from saccade.models.sot.training.sources import (
    ImageSource,
    Labelled,
    TextSource,
    image_source,
    text_source,
)
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.task import Recipe, Task

CALIBRATION, VALIDATION = 256, 1000
_BATCH = 100  # samples of one pass in validation
QUICK = Recipe(steps=1200, batch=64, learning_rate=1e-3, config=SMALL)
SHIPPED = Recipe(
    steps=3_000, batch=64, learning_rate=1e-3, config=SMALL, warm_up_steps=200, ema=0.999
)


def task(options: TrainOptions) -> "SoTTask":
    """A SoT on shapes (the default: one object, its colour and shape), digits, or own images.

    With `--set input=tokens` on an .npz of token states. Every head learns by the same recipe:
    `--set fusion=class` is the baseline.
    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
    source: ImageSource | TextSource
    if options.set.get("input") == "tokens":
        source = text_source(options, calibration=CALIBRATION)
    else:
        source = image_source(options, validation=VALIDATION, calibration=CALIBRATION)
    return SoTTask(options, recipe, source)


class SoTTask(Task):
    """A `training.task.Task`: cross entropy, of both classifiers with late fusion."""

    family = "sot"
    model: SoT

    def __init__(
        self, options: TrainOptions, recipe: Recipe, source: ImageSource | TextSource
    ) -> None:
        config = chosen_config(SoTConfig, options, recipe.config, source.fields())
        self.recipe, self.source = recipe, source
        self.data, self.data_sha256 = source.name, source.sha256
        self.labels = source.class_names
        kind = "texts" if config.input == "tokens" else "images"
        self.card = {f"validation_{kind}": len(source.validation[1])}
        self.model = new_model(SoT, config)

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """The model's inputs by name, such as image [b h w c] uint8, and labels [b]."""
        inputs, labels = self.source.draw(rng, self.recipe.batch)
        return _tensors(inputs | {"labels": labels})

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Cross entropy of the fused logits; with late fusion of each classifier."""
        x, length = _given(batch)
        return self.model.loss(x, batch["labels"], length)

    def validate(self) -> dict[str, float]:
        """Top-1 of the model as it is trained."""
        return score(self.model, self.source.validation, self.model.settings()[:1])

    def report(self) -> dict[str, float]:
        """Top-1 of every head that the model is exported with."""
        return score(self.model, self.source.validation, self.model.settings())

    def calibration(self) -> dict[str, np.ndarray]:
        """256 training samples."""
        inputs, labels = self.source.calibration
        return inputs | {"labels": labels}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(each) for name, each in arrays.items()}


def _given(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What the model takes: an image alone, or tokens with their length."""
    if "tokens" in inputs:
        return inputs["tokens"], inputs["length"]
    return inputs["image"], None


@torch.inference_mode()
def score(model: SoT, data: Labelled, settings: Sequence[Setting]) -> dict[str, float]:
    """Share of right answers by setting.

    Shapes: data the inputs [n ...] by name and labels [n] int64.
    """
    device = next(model.parameters()).device
    inputs, labels = _tensors(data[0]), torch.from_numpy(data[1]).to(device)
    scores = {}
    for setting in settings:
        chosen = model.at(setting).eval()
        right = 0
        for at in range(0, len(labels), _BATCH):
            part = slice(at, at + _BATCH)
            x, length = _given({name: each[part].to(device) for name, each in inputs.items()})
            right += int((chosen(x, length).argmax(1) == labels[part]).sum())
        scores[setting.label] = right / len(labels)
    return scores
