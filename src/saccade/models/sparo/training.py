# SPDX-License-Identifier: Apache-2.0
"""Training of SPARO and its baselines: two towers learn which sentence belongs to which scene."""

import hashlib
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.errors import SaccadeError
from saccade.models.data.asked import DataAsked
from saccade.models.data.captions import (
    CAPTION_TOKENS,
    CAPTION_WORDS,
    CaptionedScenes,
    caption,
    captioned,
)
from saccade.models.data.datasets import CALIBRATION_SAMPLES, Dataset, load_data, pixel_moments
from saccade.models.data.samples.images import read_ahead
from saccade.models.data.scene_labels import SCENE_LABELS, scene_label
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.families import new_model
from saccade.models.scores.retrieval import recalls
from saccade.models.sparo.codes import image_slots, text_slots
from saccade.models.sparo.config import SMALL, SparoConfig
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.ranking import rank_slots
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import encode_classes, prompts, zero_shot_logits
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.task import ComparingTask, Recipe, Task
from saccade.models.word_tokens import split_words

TEMPLATES = ("a {}",)


class Source(Protocol):
    """Images, sentences about them, and scores on validation data.

    Shapes: images [n h w c] uint8.
    """

    name: str
    images: np.ndarray
    fields: dict[str, Any]  # fields of the configuration that the data decides
    labels: tuple[str, ...]
    sha256: dict[str, str]
    card: dict[str, Any]

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """Draw one sentence for each chosen image."""
        ...

    def scores(self, model: Sparo) -> dict[str, float]:
        """Return scores on validation data; the first one chooses the best step."""
        ...

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `count` images and their classes.

        Shapes: -> [n h w c] uint8, [n] int64.
        """
        ...


def sha256_of_scenes(drawn: Scenes) -> str:
    """Return the SHA-256 of the pixels and of their descriptions."""
    digest = hashlib.sha256(np.ascontiguousarray(drawn.images).tobytes())
    digest.update(repr(drawn.objects).encode())
    return digest.hexdigest()


def matching_scores(model: Sparo, data: CaptionedScenes) -> dict[str, float]:
    """Return R@1 and R@5 both ways over different sentences, and the hard-negative accuracy.

    `r1` is the mean of R@1 both ways; hard negatives: how often the true sentence is nearer.
    """
    images = image_slots(model, data.images).reshape(len(data.images), -1)
    first = {text: i for i, text in reversed(list(enumerate(data.captions)))}
    kept = np.array(sorted(first.values()))
    texts = text_slots(model, data.captions).reshape(len(images), -1)
    scores = recalls(images[kept], texts[kept])
    false = text_slots(model, data.negatives).reshape(len(data.negatives), -1)
    images_of = images[data.owner]
    right = (images_of * texts[data.owner]).sum(1) > (images_of * false).sum(1)
    by_kind = {
        f"hard_negatives_{kind}": float(right[np.array(data.kinds) == kind].mean())
        for kind in sorted(set(data.kinds))
    }
    r1 = (scores["text_r1"] + scores["image_r1"]) / 2
    return {"r1": r1, **scores, "hard_negatives": float(right.mean()), **by_kind}


def zero_shot_top1(
    model: Sparo, images: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> float:
    """Return the share of images whose class has the nearest prompt.

    Shapes: images [n h w c] uint8, labels [n].
    """
    classes = encode_classes(
        lambda texts: text_slots(model, texts).reshape(len(texts), -1), names, TEMPLATES
    )
    codes = image_slots(model, images).reshape(len(images), -1)
    return float((zero_shot_logits(codes, classes, 1.0).argmax(1) == labels).mean())


def vocabulary_fields(words: tuple[str, ...], context_length: int) -> dict[str, Any]:
    """Return the fields of a model whose texts consist of these words."""
    return {"words": words, "vocabulary": len(words) + 4, "context_length": context_length}


class ShapesSource:
    """Scenes drawn once, with a new sentence at every request."""

    name = "shapes"
    labels = SCENE_LABELS

    def __init__(self, count: int, validation: int, side_px: int) -> None:
        self.training = scenes("train", count, side_px=side_px)
        held_out = scenes("validation", validation, side_px=side_px)
        self.images, self.side_px = self.training.images, side_px
        self.validation = captioned(held_out)
        self.fields = vocabulary_fields(CAPTION_WORDS, CAPTION_TOKENS)
        self.sha256 = {
            "train": sha256_of_scenes(self.training),
            "validation": sha256_of_scenes(held_out),
        }
        self.card = {"chance_r1": 1 / len(set(self.validation.captions))}

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """Draw a true sentence for each chosen scene."""
        return [caption(self.training.objects[index], rng) for index in chosen]

    def scores(self, model: Sparo) -> dict[str, float]:
        """Return mean R@1, hard negatives by kind, and zero-shot top-1 of one-object scenes."""
        images = self.labelled("validation", len(self.validation.images))
        zero_shot = zero_shot_top1(model, *images, self.labels)
        return matching_scores(model, self.validation) | {"zero_shot_top1": zero_shot}

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return scenes of one object and their classes."""
        drawn = scenes(split, count, side_px=self.side_px, objects=(1, 1))
        return drawn.images, np.array([scene_label(objects) for objects in drawn.objects], np.int64)


class LabelsSource:
    """A folder of class folders, an .npz or digits; the sentence of an image names its class."""

    def __init__(self, data: str, validation: int, side_px: int, asked: DataAsked) -> None:
        self.data: dict[str, Dataset] = {
            split: load_data(data, split, side_px=side_px, asked=asked)
            for split in ("train", "validation")
        }
        train = self.data["train"]
        self.name, self.images, self.labels = train.name, train.images, train.class_names
        self.count = validation
        said = [
            split_words(template.format(name)) for name in self.labels for template in TEMPLATES
        ]
        words = tuple(sorted({word for words in said for word in words}))
        _, height, width, channels = self.images.shape
        mean, std = pixel_moments(self.images)
        self.fields = vocabulary_fields(words, max(map(len, said)) + 2) | {
            "height_px": height,
            "width_px": width,
            "channels": channels,
            "mean": mean,
            "std": std,
            "patch_px": _patch(height, width),
        }
        self.sha256 = {split: dataset.sha256 for split, dataset in self.data.items()}
        self.card = {"sentences": list(TEMPLATES)}

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """Draw a template for each chosen image, with the name of its class."""
        places = rng.integers(len(TEMPLATES), size=len(chosen))
        names = [self.labels[label] for label in self.data["train"].labels[chosen]]
        return [TEMPLATES[i].format(name) for i, name in zip(places, names, strict=True)]

    def scores(self, model: Sparo) -> dict[str, float]:
        """Return zero-shot top-1."""
        images, labels = self.labelled("validation", self.count)
        return {"zero_shot_top1": zero_shot_top1(model, images, labels, self.labels)}

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return images of a split and their classes, the same on every call."""
        dataset = self.data[split]
        chosen = np.random.default_rng(0).permutation(len(dataset.labels))[:count]
        return dataset.images[chosen], dataset.labels[chosen]


def _patch(height: int, width: int) -> int:
    """Return the smallest patch size that gives an image at most 64 patches."""
    fitting = [
        side for side in range(1, min(height, width) + 1) if not (height % side + width % side)
    ]
    return next(side for side in fitting if height * width // side**2 <= 64 or side == fitting[-1])


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
    """Train a small CLIP on generated scenes, or on images whose sentences name their class.

    `--set pooling=cls` or gap trains a comparable baseline. With slots, the read-out replaces the
    last block of both towers (reduce_depth); a baseline keeps that block.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    return SparoTask(options)


class SparoTask(ComparingTask):
    """A `training.task.Task` that draws a new sentence for an image in every step."""

    family = "sparo"
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
        self.model = new_model(Sparo, config)
        self.data, self.data_sha256 = self.source.name, self.source.sha256
        self.labels = self.source.labels
        sizes = {"pooling": config.pooling, "training_images": len(self.source.images)}
        self.card = sizes | self.source.card

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return images [b h w c] uint8 and tokens [b n] int64."""
        total = len(self.source.images)
        chosen = rng.choice(total, min(self.recipe.batch, total), replace=False)
        tokens = encode_texts(self.model.runtime_metadata(), self.source.sentences(chosen, rng))
        images = torch.from_numpy(self.source.images[chosen])
        read_ahead(
            self.source.images,
            lambda: deepcopy(rng).choice(total, min(self.recipe.batch, total), replace=False),
        )
        return {"image": images, "tokens": torch.from_numpy(tokens)}

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

    def finish(self) -> None:
        """Order slots by the zero-shot accuracy of each alone, on validation images."""
        if self.model.config.pooling != "sparo":
            return
        images, labels = self.source.labelled("validation", self._validation)
        texts = [
            text for prompt_set in prompts(self.source.labels, TEMPLATES) for text in prompt_set
        ]
        classes = text_slots(self.model, texts)
        classes = classes.reshape(len(self.source.labels), len(TEMPLATES), *classes.shape[1:])
        order, _ = rank_slots(image_slots(self.model, images), labels, classes)
        self.model.slot_order.copy_(torch.tensor(order))

    def report(self) -> dict[str, float]:
        """Return all scores of the data."""
        return self.source.scores(self.model)

    @property
    def _validation(self) -> int:
        count: int = self.recipe.extra["validation_images"]
        return count

    def calibration(self) -> dict[str, np.ndarray]:
        """Return images with their classes, and sentences (about other images)."""
        images, labels = self.source.labelled("train", CALIBRATION_SAMPLES)
        again = np.arange(CALIBRATION_SAMPLES) % len(images)  # a small data set has fewer
        images, labels = images[again], labels[again]
        rng = np.random.default_rng(0)
        texts = self.source.sentences(np.arange(len(images)) % len(self.source.images), rng)
        tokens = encode_texts(self.model.runtime_metadata(), texts)
        return {"image": images, "labels": labels, "tokens": tokens}


def _source(options: TrainOptions, recipe: Recipe) -> Source:
    count = recipe.extra["validation_images"]
    if options.data in (None, "shapes"):
        side_px = options.value("height_px", recipe.config["height_px"])
        return ShapesSource(recipe.extra["scenes"], count, side_px)
    return LabelsSource(options.data, count, options.side_px, options.asked)
