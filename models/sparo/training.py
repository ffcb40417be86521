# SPDX-License-Identifier: Apache-2.0
"""Training of SPARO and its baselines: two towers learn which sentence belongs to which scene."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note
from saccade.models.data.image_texts import has_sentences
from saccade.models.data.splits import CALIBRATION_SAMPLES
from saccade.models.families import new_model
from saccade.models.sparo.codes import image_slots, text_slots
from saccade.models.sparo.config import SMALL, SparoConfig
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.ranking import rank_slots
from saccade.models.sparo.sources import LabelsSource, PairsSource, ShapesSource, SPAROData
from saccade.models.sparo.text_tokens import text_encoder
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import ComparingTask, Recipe, Task

_POOLED = ("image_pool", "text_pool", "codebook", "logit_scale", "slot_order", "slot_mask")
# Fields that change what a pooling computes, or the shape of its weights.
_POOLING = (
    "pooling", "text_pooling", "embed_dim", "bottleneck_dim", "codes", "queries", "pooler_heads",
    "mean_of_queries", "text_queries", "text_pooler_heads", "text_mean_of_queries", "slots",
    "slot_dim", "attn_dim", "value_dim", "slot_heads", "share_kv", "share_queries", "sparo_type",
    "kept", "masked",
)  # fmt: skip
LARGEST_SCALE = math.log(100)  # of the logits, limited as in CLIP
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
    """Train a small CLIP on generated scenes, on images with sentences, or on images of classes.

    The sentence of an image of a class names the class.

    `--set pooling=cls` or gap trains a comparable baseline. With slots, the read-out replaces the
    last block of both towers (reduce_depth); a baseline keeps that block.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    return SparoTask(options)


class SparoTask(ComparingTask):
    """A `training.task.Task` that draws a new sentence for an image in every step."""

    family = "sparo"
    regularized_by = ("augment",)
    model: Sparo

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        depth = {} if options.value("pooling", "sparo") != "sparo" else {"reduce_depth": 1}
        self.source = _source(options, self.recipe)
        given = self.source.fields | depth
        config = chosen_config(SparoConfig, options, self.recipe.config, given)
        if config.height_px != self.source.images.shape[1] or not config.text:
            raise SaccadeError(
                f"the images are {self.source.images.shape[1]} px high and have sentences, but "
                f"--set has height_px {config.height_px} and text {config.text}. Change --set."
            )
        if options.start is not None and config.pooling != "sparo" and "pooling" not in options.set:
            note(
                f"the checkpoint of --init has no slots (pooling {config.pooling}), and stays so. "
                "--set pooling=sparo puts SPARO's read-out on its towers."
            )
        self.changes = ImageChanges(
            self.recipe, images=self.source.images, originals=self.source.originals
        )
        self.model = new_model(Sparo, config)
        self.encode = text_encoder(self.model.runtime_metadata())
        self.data, self.data_sha256 = self.source.name, self.source.sha256
        self.labels = self.source.labels
        self.shots = options.shots if isinstance(self.source, LabelsSource) else None
        sizes = {"pooling": config.pooling, "training_images": len(self.source.images)}
        self.card = sizes | self.source.card

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w c] uint8 and tokens [b n] int64."""
        chosen = self._drawn(rng)
        tokens = self.encode(self.source.sentences(chosen, rng), truncate=True)
        images, _ = self.changes.chosen(chosen, rng, then=self._drawn)
        return {"image": images, "tokens": torch.from_numpy(tokens)}

    def _drawn(self, rng: np.random.Generator) -> np.ndarray:
        total = len(self.source.images)
        return rng.choice(total, min(self.recipe.batch, total), replace=False)

    def codes(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the codes of the images and of the sentences, both [b d]."""
        image = self.model.encode_image(batch["image"]).code
        return image, self.model.encode_text(batch["tokens"]).code

    def compare(self, codes: tuple[Tensor, ...], batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the cross entropy both ways; equal sentences in a batch share the target.

        Source: Radford et al. 2021 (CLIP), figure 3.
        """
        image, text = codes
        logits = self.model.logit_scale.clamp(max=LARGEST_SCALE).exp() * image @ text.mT
        equal = (batch["tokens"][:, None] == batch["tokens"]).all(-1).to(logits.dtype)
        target = equal / equal.sum(1, keepdim=True)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.mT, target)) / 2

    def validate(self) -> dict[str, float]:
        """Return the data's first score, and that of hard negatives if there are any."""
        scores = self.source.scores(self.model)
        first = next(iter(scores))
        return {name: scores[name] for name in (first, "hard_negatives") if name in scores}

    def redrawn(self, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the poolings if they differ, with the scale of their cosines, and left-out blocks.

        A read-out can so be trained on the towers of a CLIP that has none.
        """
        config = self.model.config
        now, usual = config.to_dict(), SparoConfig().to_dict()
        changed = any(now[name] != before.get(name, usual[name]) for name in _POOLING)
        parts: tuple[str, ...] = _POOLED if changed else ()
        for tower, layers in (("image", config.image_layers), ("text", config.text_layers)):
            kept = range(layers - config.reduce_depth, layers)
            parts += tuple(f"{tower}.blocks.{index}" for index in kept)
        return parts

    def finish(self) -> None:
        """Order slots by the zero-shot accuracy of each alone, on validation images.

        With the user's sentences, each image is a separate class.
        """
        if self.model.config.pooling != "sparo":
            return
        count = self.recipe.extra["validation_images"]
        images, labels = self.source.labelled("validation", count)
        named = self.source.named()
        texts = [text for sentences in named for text in sentences]
        classes = text_slots(self.model, texts, truncate=True)
        classes = classes.reshape(len(named), -1, *classes.shape[1:])
        order, _ = rank_slots(image_slots(self.model, images), labels, classes)
        self.model.slot_order.copy_(torch.tensor(order))

    def report(self) -> dict[str, float]:
        """Return all scores of the data."""
        return self.source.scores(self.model)

    def calibration(self) -> dict[str, np.ndarray]:
        """Return images, with their classes if they have any, and sentences of other images."""
        images, labels = self.source.labelled("train", CALIBRATION_SAMPLES)
        again = np.arange(CALIBRATION_SAMPLES) % len(images)  # a small data set has fewer
        images, labels = images[again], labels[again]
        rng = np.random.default_rng(0)
        texts = self.source.sentences(np.arange(len(images)) % len(self.source.images), rng)
        arrays = {"image": images, "tokens": self.encode(texts, truncate=True)}
        return arrays | ({"labels": labels} if self.source.labels else {})


def _source(options: TrainOptions, recipe: Recipe) -> SPAROData:
    count = recipe.extra["validation_images"]
    if options.data in (None, "shapes"):
        side_px = options.value("height_px", recipe.config["height_px"])
        return ShapesSource(recipe.extra["scenes"], count, side_px)
    if has_sentences(options.data):
        return PairsSource(options.data, count, options.side_px, options.asked, options.start)
    return LabelsSource(options.data, count, options.side_px, options.asked)
