# SPDX-License-Identifier: Apache-2.0
"""Two towers that learn which sentence belongs to which scene: SPARO and its baselines."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.models.clip_tokens import encode_texts
from saccade.models.data.captions import CAPTION_TOKENS, CAPTION_WORDS
from saccade.models.data.scene_labels import SCENE_LABELS
from saccade.models.data.shapes import scenes
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo import Sparo
from saccade.models.sparo_config import SparoConfig
from saccade.models.sparo_presets import SMALL
from saccade.models.sparo_select import rank_slots
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.sparo_scenes import (
    TEMPLATES,
    image_slots,
    labelled,
    matching_scores,
    sentences,
    sha256_of_scenes,
    text_slots,
    told,
    zero_shot_top1,
)
from saccade.models.training.task import Recipe, Task
from saccade.models.zero_shot import prompts
from saccade.plugins.errors import SaccadeError

CALIBRATION_SAMPLES = 256
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
    extra={"scenes": 8_000, "validation_scenes": 300},
    **_RECIPE,  # type: ignore[arg-type]
)
SHIPPED = Recipe(
    steps=5_000,
    batch=256,
    learning_rate=1.5e-3,
    config=SMALL,
    extra={"scenes": 40_000, "validation_scenes": 500},
    **_RECIPE,  # type: ignore[arg-type]
)


def task(options: TrainOptions) -> Task:
    """A small CLIP on generated scenes; `--set pooling=cls` or gap trains a baseline alike.

    Where the slots replace the last image block (reduce_depth), a baseline keeps it.

    Raises: SaccadeError if the data is another, or the configuration cannot be used.
    """
    if options.data not in (None, "shapes"):
        raise SaccadeError(
            f"data '{options.data}' has no sentences. Train sparo with --data shapes, or convert "
            "a checkpoint that has learned from captions."
        )
    return SparoTask(options)


class SparoTask:
    """A `training.task.Task`: scenes drawn once, a new sentence for a scene in every step."""

    family = "sparo"
    data = "shapes"

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        words = {
            "words": CAPTION_WORDS,
            "vocabulary": len(CAPTION_WORDS) + 4,
            "context_length": CAPTION_TOKENS,
        }
        depth = {} if options.set.get("pooling", "sparo") != "sparo" else {"reduce_depth": 1}
        config = chosen_config(SparoConfig, options, self.recipe.config, words, depth)
        if config.height_px != config.width_px or config.channels != 3 or not config.text:
            raise SaccadeError(
                f"scenes are square and in colour, found {config.height_px}x{config.width_px} px "
                f"with {config.channels} channels and text {config.text}. Change --set."
            )
        self.model = Sparo(config)
        side = config.height_px
        self.training = scenes("train", self.recipe.extra["scenes"], side_px=side)
        validation = scenes("validation", self.recipe.extra["validation_scenes"], side_px=side)
        self.validation = told(validation)
        self.data_sha256 = {
            "train": sha256_of_scenes(self.training),
            "validation": sha256_of_scenes(validation),
        }
        self.card: Mapping[str, Any] = {
            "pooling": config.pooling,
            "training_scenes": len(self.training.images),
            "chance_r1": 1 / len(set(self.validation.sentences)),
        }

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Images [b s s 3] uint8, tokens [b n] int64."""
        total = len(self.training.images)
        chosen = rng.choice(total, min(self.recipe.batch, total), replace=False)
        tokens = encode_texts(self.model.facts(), sentences(self.training, chosen, rng))
        images = torch.from_numpy(self.training.images[chosen])
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
        """Mean R@1 both ways first, then hard negatives."""
        scores = matching_scores(self.model, self.validation)
        return {name: scores[name] for name in ("r1", "hard_negatives")}

    def finish(self) -> None:
        """Order slots by what each knows alone of the classes, on validation scenes."""
        if self.model.config.pooling != "sparo":
            return
        with torch.no_grad():
            images, labels = self._labelled("validation")
            texts = [text for each in prompts(SCENE_LABELS, TEMPLATES) for text in each]
            classes = text_slots(self.model, texts)
            classes = classes.reshape(len(SCENE_LABELS), len(TEMPLATES), *classes.shape[1:])
            order, _ = rank_slots(image_slots(self.model, images), labels, classes)
            self.model.slot_order.copy_(torch.tensor(order))

    def report(self) -> dict[str, float]:
        """Retrieval, hard negatives by kind, and zero-shot top-1 of one-object scenes."""
        zero_shot = zero_shot_top1(self.model, *self._labelled("validation"))
        return matching_scores(self.model, self.validation) | {"zero_shot_top1": zero_shot}

    def _labelled(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        count = self.recipe.extra["validation_scenes"]
        return labelled(split, count, self.model.config.height_px)

    def saved(self) -> dict[str, Any]:
        """Configuration, input, classes; calibration images are of one object, texts of several."""
        config = self.model.config
        images, labels = labelled("train", CALIBRATION_SAMPLES, config.height_px)
        rng = np.random.default_rng(0)
        chosen = np.arange(CALIBRATION_SAMPLES) % len(self.training.objects)
        texts = sentences(self.training, chosen, rng)
        return {
            "config": config.to_dict(),
            "preprocessing": Preprocessing(
                config.height_px, config.width_px, config.channels, config.mean, config.std
            ),
            "labels": SCENE_LABELS,
            "calibration": {
                "image": images,
                "labels": labels,
                "tokens": encode_texts(self.model.facts(), texts),
            },
        }
