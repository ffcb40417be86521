# SPDX-License-Identifier: Apache-2.0
"""What two towers learn from: scenes with sentences, or a user's images with class names."""

from typing import Any, Protocol

import numpy as np

from saccade.models.data.captions import CAPTION_TOKENS, CAPTION_WORDS
from saccade.models.data.datasets import Dataset, load_data, pixel_moments
from saccade.models.data.scene_labels import SCENE_LABELS
from saccade.models.data.shapes import scenes
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.training.scenes import (
    TEMPLATES,
    labelled,
    matching_scores,
    sentences,
    sha256_of_scenes,
    told,
    zero_shot_top1,
)
from saccade.models.word_tokens import split_words


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
        self.images, self.side_px, self.validation = self.training.images, side_px, told(held_out)
        self.fields = vocabulary_fields(CAPTION_WORDS, CAPTION_TOKENS)
        self.sha256 = {
            "train": sha256_of_scenes(self.training),
            "validation": sha256_of_scenes(held_out),
        }
        self.card = {"chance_r1": 1 / len(set(self.validation.sentences))}

    def sentences(self, chosen: np.ndarray, rng: np.random.Generator) -> list[str]:
        """A true one for each chosen scene."""
        return sentences(self.training, chosen, rng)

    def scores(self, model: Sparo) -> dict[str, float]:
        """Mean R@1 both ways, hard negatives by kind, zero-shot top-1 of one-object scenes."""
        images = self.labelled("validation", len(self.validation.images))
        zero_shot = zero_shot_top1(model, *images, self.labels)
        return matching_scores(model, self.validation) | {"zero_shot_top1": zero_shot}

    def labelled(self, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Scenes of one object."""
        return labelled(split, count, self.side_px)


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
