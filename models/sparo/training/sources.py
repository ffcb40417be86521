# SPDX-License-Identifier: Apache-2.0
"""What two towers learn from: scenes with sentences, or a user's images with class names."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from saccade.models.data.captions import (
    CAPTION_TOKENS,
    CAPTION_WORDS,
    CaptionedScenes,
    caption,
    captioned,
)
from saccade.models.data.datasets import Dataset, load_data, pixel_moments
from saccade.models.data.scene_labels import SCENE_LABELS, scene_label
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.scores.retrieval import recalls
from saccade.models.sparo.codes import image_slots, text_slots
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.zero_shot import encode_classes, zero_shot_logits
from saccade.models.word_tokens import split_words

TEMPLATES = ("a {}",)


class Source(Protocol):
    """Images, sentences about them, and scores on validation data.

    Shapes: images [n h w c] uint8.
    """

    name: str
    images: np.ndarray
    fields: dict[str, Any]  # of the configuration, that the data decides
    labels: tuple[str, ...]
    sha256: dict[str, str]
    card: dict[str, Any]

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """One for each chosen image."""
        ...

    def scores(self, model: Sparo) -> dict[str, float]:
        """On validation data, the one that chooses the best step first."""
        ...

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Images and their classes, at most so many.

        Shapes: -> [n h w c] uint8, [n] int64.
        """
        ...


def sha256_of_scenes(drawn: Scenes) -> str:
    """Of the pixels and of everything that is said about them."""
    digest = hashlib.sha256(np.ascontiguousarray(drawn.images).tobytes())
    digest.update(repr(drawn.objects).encode())
    return digest.hexdigest()


def matching_scores(model: Sparo, data: CaptionedScenes) -> dict[str, float]:
    """R@1 and R@5 both ways over different sentences, and how often the true one is nearer.

    `r1` is the mean of R@1 both ways.
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
    """Share of images whose class has the nearest prompt.

    Shapes: images [n h w c] uint8, labels [n].
    """
    classes = encode_classes(
        lambda texts: text_slots(model, texts).reshape(len(texts), -1), names, TEMPLATES
    )
    codes = image_slots(model, images).reshape(len(images), -1)
    return float((zero_shot_logits(codes, classes, 1.0).argmax(1) == labels).mean())


def vocabulary_fields(words: tuple[str, ...], context_length: int) -> dict[str, Any]:
    """Fields of a model whose texts are of these words."""
    return {"words": words, "vocabulary": len(words) + 4, "context_length": context_length}


class ShapesSource:
    """Scenes drawn once, with a new sentence whenever one is asked for."""

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
        """A true one for each chosen scene."""
        return [caption(self.training.objects[index], rng) for index in chosen]

    def scores(self, model: Sparo) -> dict[str, float]:
        """Mean R@1 both ways, hard negatives by kind, zero-shot top-1 of one-object scenes."""
        images = self.labelled("validation", len(self.validation.images))
        zero_shot = zero_shot_top1(model, *images, self.labels)
        return matching_scores(model, self.validation) | {"zero_shot_top1": zero_shot}

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Scenes of one object."""
        drawn = scenes(split, count, side_px=self.side_px, objects=(1, 1))
        return drawn.images, np.array([scene_label(each) for each in drawn.objects], np.int64)


class LabelsSource:
    """A folder of class folders, an .npz or digits: an image's sentence names its class."""

    def __init__(self, data: str, validation: int, side_px: int) -> None:
        self.data: dict[str, Dataset] = {
            split: load_data(data, split, side_px=side_px) for split in ("train", "validation")
        }
        train = self.data["train"]
        self.name, self.images, self.labels = train.name, train.images, train.class_names
        self.count = validation
        said = [split_words(each.format(name)) for name in self.labels for each in TEMPLATES]
        words = tuple(sorted({word for each in said for word in each}))
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
        self.sha256 = {split: each.sha256 for split, each in self.data.items()}
        self.card = {"sentences": list(TEMPLATES)}

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """A template with the name of the class."""
        places = rng.integers(len(TEMPLATES), size=len(chosen))
        names = [self.labels[label] for label in self.data["train"].labels[chosen]]
        return [TEMPLATES[i].format(name) for i, name in zip(places, names, strict=True)]

    def scores(self, model: Sparo) -> dict[str, float]:
        """Zero-shot top-1."""
        images, labels = self.labelled("validation", self.count)
        return {"zero_shot_top1": zero_shot_top1(model, images, labels, self.labels)}

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Images of a split, the same on every call."""
        found = self.data[split]
        chosen = np.random.default_rng(0).permutation(len(found.labels))[:count]
        return found.images[chosen], found.labels[chosen]


def _patch(height: int, width: int) -> int:
    """The smallest patch with which an image has at most 64 of them."""
    fitting = [
        side for side in range(1, min(height, width) + 1) if not (height % side + width % side)
    ]
    return next(side for side in fitting if height * width // side**2 <= 64 or side == fitting[-1])
