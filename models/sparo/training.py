# SPDX-License-Identifier: Apache-2.0
"""Training of SPARO and its baselines: two towers learn which sentence belongs to which image."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.datasets import Dataset, image_fields, load_data
from saccade.models.data.image_texts import has_sentences, load_pairs
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.images import Images
from saccade.models.data.scene_texts import (
    CAPTION_TOKENS,
    CAPTION_WORDS,
    SCENE_LABELS,
    CaptionedScenes,
    caption,
    captioned,
    scene_label,
)
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.data.splits import CALIBRATION_SAMPLES
from saccade.models.families import new_model
from saccade.models.scores.retrieval import ranks_of_pairs, recalls
from saccade.models.sparo.config import SMALL, SparoConfig
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.ranking import image_slots, rank_slots, text_slots
from saccade.models.sparo.text_tokens import text_encoder
from saccade.models.sparo.zero_shot import encode_classes, prompts, zero_shot_logits
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import ComparingTask, Recipe, Task
from saccade.models.word_tokens import split_words

TEMPLATES = ("a {}",)


class SPAROData(ABC):
    """Images, sentences about them, and scores on validation data.

    Shapes: images [n h w c] uint8.
    """

    name: str
    images: np.ndarray
    originals: Images | None = None  # the same images in the size of their files, if they have one
    fields: dict[str, Any]  # fields of the configuration that the data decides
    labels: tuple[str, ...] = ()
    sha256: dict[str, str]
    card: dict[str, Any]

    @abstractmethod
    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """Draw one sentence for each chosen image."""

    @abstractmethod
    def scores(self, model: Sparo) -> dict[str, float]:
        """Return scores on validation data; the first one chooses the best step."""

    @abstractmethod
    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `count` images and their classes, the same on every call.

        Shapes: -> [n h w c] uint8, [n] int64.
        """

    def named(self) -> list[list[str]]:
        """Return the sentences that name each class of the validation images, equally many each."""
        return prompts(self.labels, TEMPLATES)


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


class ShapesSource(SPAROData):
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


class LabelsSource(SPAROData):
    """A folder of class folders, an .npz or digits; the sentence of an image names its class."""

    def __init__(self, data: str, validation: int, side_px: int, asked: DataOptions) -> None:
        self.data: dict[str, Dataset] = {
            split: load_data(data, split, side_px=side_px, asked=asked)
            for split in ("train", "validation")
        }
        train = self.data["train"]
        self.name, self.images, self.labels = train.name, train.images, train.class_names
        self.originals, self.count = train.originals, validation
        said = [
            split_words(template.format(name)) for name in self.labels for template in TEMPLATES
        ]
        words = tuple(sorted({word for words in said for word in words}))
        self.fields = vocabulary_fields(words, max(map(len, said)) + 2) | _image_fields(self.images)
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


class PairsSource(SPAROData):
    """The user's images with sentences, of which a new one is drawn at every request.

    With a checkpoint to start from, sentences are encoded by its tokenizer. Otherwise the words are
    the most frequent ones of the training sentences.
    """

    def __init__(
        self, data: str, validation: int, side_px: int, asked: DataOptions, start: Checkpoint | None
    ) -> None:
        self.pairs = {
            split: load_pairs(data, split, asked, asked.preprocessing, side_px=side_px)
            for split in ("train", "validation")
        }
        train = self.pairs["train"]
        self.name, self.images, self.count = train.name, train.images, validation
        self.originals = train.originals
        texts, _ = train.spread()
        if start is None:
            self.fields = self._fields(texts)
        else:
            _, height, width, channels = self.images.shape
            self.fields = {"height_px": height, "width_px": width, "channels": channels}
            note_unknown_words(texts, start.config.get("words", ()))
        self.sha256 = {split: pairs.sha256 for split, pairs in self.pairs.items()}
        first: dict[str, int] = {}
        order = np.random.default_rng(0).permutation(len(self.pairs["validation"]))
        for place in order.tolist():
            first.setdefault(self.pairs["validation"].texts(place)[0], place)
        self.first = dict(list(first.items())[:validation])
        # Such data has no classes, which the family's first task needs.
        self.card = {"training_sentences": len(texts), "task": "retrieval"}

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """Draw one of the sentences of each chosen image."""
        own = [self.pairs["train"].texts(place) for place in chosen.tolist()]
        return [texts[rng.integers(len(texts))] for texts in own]

    def scores(self, model: Sparo) -> dict[str, float]:
        """Return mean R@1, and R@1, R@5 and R@10 both ways, of validation images."""
        pairs = self.pairs["validation"].first(self.count)
        texts, image_of = pairs.spread()
        images = image_slots(model, pairs.images).reshape(len(pairs), -1)
        codes = text_slots(model, texts, truncate=True).reshape(len(texts), -1)
        ranks = ranks_of_pairs(images, codes, texts, image_of)
        scores = {
            f"{name}_r{top}": float(np.mean(tower_ranks <= top))
            for name, tower_ranks in zip(("text", "image"), ranks, strict=True)
            for top in (1, 5, 10)
        }
        return {"r1": (scores["text_r1"] + scores["image_r1"]) / 2} | scores

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return images of a split, each a separate class, the same on every call."""
        images = self.pairs[split].images
        if split == "validation":
            chosen = np.array(list(self.first.values()))
        else:
            chosen = np.random.default_rng(0).permutation(len(images))[:count]
        return images[chosen], np.arange(len(chosen))

    def named(self) -> list[list[str]]:
        """Return the first sentence of each validation image."""
        return [[text] for text in self.first]

    def _fields(self, texts: Sequence[str]) -> dict[str, Any]:
        said = [split_words(text) for text in texts]
        counts = Counter(word for words in said for word in words)
        words = sorted(word for word, _ in counts.most_common(_MOST_WORDS))
        if len(words) < len(counts):
            note(f"{self.name}: kept the {len(words):,} most frequent of {len(counts):,} words")
        longest = min(max(map(len, said)) + 2, _MOST_TOKENS)
        return vocabulary_fields(tuple(words), longest) | _image_fields(self.images)


_MOST_WORDS = 30_000  # of a new model; others are read as one unknown word
_MOST_TOKENS = 77  # per sentence, as in CLIP; longer sentences are cut


def note_unknown_words(texts: Sequence[str], known: Sequence[str]) -> None:
    """Say how many words of the sentences a model of these words reads as unknown."""
    if not known:
        return  # pieces of words can write any word
    words = {word for text in texts for word in split_words(text)}
    if unknown := sorted(words - set(known)):
        note(
            f"{len(unknown):,} of the {len(words):,} words of the sentences are not among the "
            f"{len(known):,} of --init, which reads them as unknown ({', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''})"
        )


def _image_fields(images: np.ndarray) -> dict[str, Any]:
    return image_fields(images) | {"patch_px": _patch(*images.shape[1:3])}


def _patch(height: int, width: int) -> int:
    """Return the smallest patch size that gives an image at most 64 patches."""
    fitting = [
        side for side in range(1, min(height, width) + 1) if not (height % side + width % side)
    ]
    return next(side for side in fitting if height * width // side**2 <= 64 or side == fitting[-1])


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
        return PairsSource(options.data, count, options.new_side_px, options.asked, options.start)
    return LabelsSource(options.data, count, options.new_side_px, options.asked)
