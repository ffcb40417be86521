# SPDX-License-Identifier: Apache-2.0
"""Two towers that learn which sentence belongs to which scene: SPARO and its baselines."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.errors import SaccadeError
from saccade.models.data.datasets import CALIBRATION_SAMPLES
from saccade.models.families import new_model
from saccade.models.sparo.codes import image_slots, text_slots
from saccade.models.sparo.config import SMALL, SparoConfig
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.ranking import rank_slots
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.training.sources import TEMPLATES, LabelsSource, ShapesSource, Source
from saccade.models.sparo.zero_shot import prompts
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.task import Recipe, Task

LARGEST_SCALE = math.log(100)  # of the logits, as CLIP limits it
_RECIPE = {
    "without_decay": ("bias", "norm", "position", "class_token", "logit_scale"),
    "weight_decay": 0.1,
    "warm_up_steps": 100,
    "ema": 0.99,
}
QUICK = Recipe(
    steps=1_000,
    batch=128,
    learning_rate=2e-3,
    config=SMALL | {"patch_px": 8, "image_layers": 3},
    extra={"scenes": 8_000, "validation_images": 300},
    **_RECIPE,  # type: ignore[arg-type]
)
SHIPPED = replace(QUICK, steps=4_000, extra={"scenes": 40_000, "validation_images": 500})


def task(options: TrainOptions) -> Task:
    """A small CLIP on generated scenes, or on images whose sentences name their class.

    `--set pooling=cls` or gap trains a baseline alike. Where slots replace the last block of both
    towers (reduce_depth), a baseline keeps it.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    return SparoTask(options)


class SparoTask(Task):
    """A `training.task.Task`: a new sentence for an image in every step."""

    family = "sparo"
    model: Sparo

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        depth = {} if options.set.get("pooling", "sparo") != "sparo" else {"reduce_depth": 1}
        self.source = _source(options, self.recipe)
        given = self.source.fields | depth
        config = chosen_config(SparoConfig, options, self.recipe.config, given)
        if config.height_px != self.source.images.shape[1] or not config.text:
            raise SaccadeError(
                f"the images are {self.source.images.shape[1]} px high and have sentences, found "
                f"height_px {config.height_px} and text {config.text}. Change --set."
            )
        self.model = new_model(Sparo, config)
        self.data, self.data_sha256 = self.source.name, self.source.sha256
        self.labels = self.source.labels
        sizes = {"pooling": config.pooling, "training_images": len(self.source.images)}
        self.card = sizes | self.source.card

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Images [b h w c] uint8, tokens [b n] int64."""
        total = len(self.source.images)
        chosen = rng.choice(total, min(self.recipe.batch, total), replace=False)
        tokens = encode_texts(self.model.facts(), self.source.sentences(chosen, rng))
        images = torch.from_numpy(self.source.images[chosen])
        return {"image": images, "tokens": torch.from_numpy(tokens)}

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Cross entropy both ways; equal sentences of a batch share what is right.

        Source: Radford et al. 2021 (CLIP), figure 3.
        """
        image = self.model.encode_image(batch["image"]).code
        text = self.model.encode_text(batch["tokens"]).code
        logits = self.model.logit_scale.clamp(max=LARGEST_SCALE).exp() * image @ text.mT
        equal = (batch["tokens"][:, None] == batch["tokens"]).all(-1).to(logits.dtype)
        target = equal / equal.sum(1, keepdim=True)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.mT, target)) / 2

    def validate(self) -> dict[str, float]:
        """What the data scores first, and hard negatives where it has them."""
        scores = self.source.scores(self.model)
        first = next(iter(scores))
        return {name: scores[name] for name in (first, "hard_negatives") if name in scores}

    def finish(self) -> None:
        """Order slots by what each knows alone of the classes, on validation images."""
        if self.model.config.pooling != "sparo":
            return
        images, labels = self.source.labelled("validation", self._validation)
        texts = [text for each in prompts(self.source.labels, TEMPLATES) for text in each]
        classes = text_slots(self.model, texts)
        classes = classes.reshape(len(self.source.labels), len(TEMPLATES), *classes.shape[1:])
        order, _ = rank_slots(image_slots(self.model, images), labels, classes)
        self.model.slot_order.copy_(torch.tensor(order))

    def report(self) -> dict[str, float]:
        """All scores of the data."""
        return self.source.scores(self.model)

    @property
    def _validation(self) -> int:
        count: int = self.recipe.extra["validation_images"]
        return count

    def calibration(self) -> dict[str, np.ndarray]:
        """Images that have a class, and sentences about others."""
        images, labels = self.source.labelled("train", CALIBRATION_SAMPLES)
        again = np.arange(CALIBRATION_SAMPLES) % len(images)  # a small data set has fewer
        images, labels = images[again], labels[again]
        rng = np.random.default_rng(0)
        texts = self.source.sentences(np.arange(len(images)) % len(self.source.images), rng)
        tokens = encode_texts(self.model.facts(), texts)
        return {"image": images, "labels": labels, "tokens": tokens}


def _source(options: TrainOptions, recipe: Recipe) -> Source:
    count = recipe.extra["validation_images"]
    if options.data in (None, "shapes"):
        side_px = options.set.get("height_px", recipe.config["height_px"])
        return ShapesSource(recipe.extra["scenes"], count, side_px)
    return LabelsSource(options.data, count, options.side_px)
