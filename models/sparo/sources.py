# SPDX-License-Identifier: Apache-2.0
"""Images and sentences that SPARO is trained on: scenes, the user's pairs, or names of classes."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from saccade.core.verbosity import note
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.datasets import Dataset, image_fields, load_data
from saccade.models.data.image_texts import load_pairs
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
from saccade.models.scores.retrieval import ranks_of_pairs, recalls
from saccade.models.sparo.codes import image_slots, text_slots
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.zero_shot import encode_classes, prompts, zero_shot_logits
from saccade.models.word_tokens import split_words

TEMPLATES = ("a {}",)


class SPAROData(Protocol):
    """Images, sentences about them, and scores on validation data.

    Shapes: images [n h w c] uint8.
    """

    name: str
    images: np.ndarray
    originals: Images | None  # the same images in the size of their files, if they have one
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

    def named(self) -> list[list[str]]:
        """Return the sentences that name each class of the validation images, equally many each."""
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
    originals: Images | None = None

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

    def named(self) -> list[list[str]]:
        """Return each class in each template."""
        return prompts(self.labels, TEMPLATES)


class LabelsSource:
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

    def named(self) -> list[list[str]]:
        """Return each class in each template."""
        return prompts(self.labels, TEMPLATES)


class PairsSource:
    """The user's images with sentences, of which a new one is drawn at every request.

    With a checkpoint to start from, sentences are encoded by its tokenizer. Otherwise the words are
    the most frequent ones of the training sentences.
    """

    labels: tuple[str, ...] = ()

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
