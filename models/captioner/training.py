# SPDX-License-Identifier: Apache-2.0
"""Training of a captioner on scenes of shapes or on the user's images."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.captioner.model import Captioner, CaptionerConfig
from saccade.models.data.image_texts import captioned_split
from saccade.models.data.samples.sentences import open_captions
from saccade.models.data.scene_texts import CAPTION_TOKENS, CAPTION_WORDS, caption, is_true
from saccade.models.data.splits import calibration_rows
from saccade.models.families import new_model
from saccade.models.scores.attention import jensen_shannon, repetition
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.training.image_texts import (
    ImageTextsTask,
    chosen_words,
    encoder_fields,
    longest_text,
    with_counts,
)
from saccade.models.training.options import (
    TrainOptions,
    chosen_config,
    chosen_recipe,
)
from saccade.models.training.scene_mix import MIX, SceneTask
from saccade.models.training.task import Recipe, Task
from saccade.models.word_tokens import PAD, WordVocabulary

CALIBRATION_IMAGES = 256  # of 48x48 px: 1.7 MiB; a shipped file has at most 3
REFERENCES = 5  # captions per validation image, as in data sets of photographs

EXTRA: dict[str, Any] = {
    "scenes": 8_000,  # drawn once; every batch has new captions of them
    **MIX,
    "validate_images": 200,  # during training, greedy search
    "report_images": 500,  # at the end, with the configured beam
}
QUICK = Recipe(
    steps=3_000,
    batch=32,
    learning_rate=3e-3,
    weight_decay=0.01,
    extra=EXTRA,
    validate_every=500,
)
SHIPPED = replace(QUICK, steps=5_000, batch=64, extra={**EXTRA, "scenes": 30_000, "singles": 5_000})


# Of the user's data. Words as many as in the paper's preset.
COUNTS = {"most_words": 9_996, "word_count": 1}
_LONGEST = 30  # words of a caption; what is longer is cut
_CELLS = 8  # per side of the small encoder's grid


def task(options: TrainOptions) -> "CaptionTask":
    """Train on shapes or own data; `--set attention=softmax|sparsemax|tvmax` chooses the output's.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    own = options.data not in (None, "shapes")
    return OwnCaptionTask(options) if own else CaptionerTask(options)


class CaptionTask(Task):
    """A `training.task.Task`: the cross entropy of each next word, given the true words."""

    family = "captioner"
    model: Captioner
    vocabulary: WordVocabulary
    references: list[Sequence[str]]  # of each validation image

    def _batch(self, images: Any, texts: Sequence[str]) -> dict[str, Any]:
        tokens = self._tokens(texts)
        used = int((tokens != PAD).sum(1).max())
        return {"images": images, "tokens": torch.from_numpy(tokens[:, :used])}

    def _tokens(self, texts: Sequence[str]) -> np.ndarray:
        length = self.model.config.max_length + 2
        return np.stack([self.vocabulary.encode(text, length, truncate=True) for text in texts])

    def weight(self, part: dict[str, Tensor]) -> float:
        """Return the number of words and end tokens."""
        return int((part["tokens"][:, 1:] != PAD).sum())

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the cross entropy over the words and the end token."""
        tokens = batch["tokens"]
        logits, _ = self.model(batch["images"], tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    def _captions(
        self, images: np.ndarray, beam: int | None = None
    ) -> tuple[list[str], list[np.ndarray]]:
        """Return the captions of images, and the attention at their words."""
        captions = self.model.caption(images, beam=beam)
        return self.model.texts(captions), [caption.attention for caption in captions]

    def _scores(self, captions: Sequence[str], maps: Sequence[np.ndarray]) -> dict[str, float]:
        """Return all scores of captions, and measures of their attention."""
        references = self.references[: len(captions)]
        repeated = [
            repetition(text.split(), [text.split() for text in known])
            for text, known in zip(captions, references, strict=True)
        ]
        attention = [weights for weights in maps if len(weights)]  # not of empty captions
        return {
            "cider": float(cider(captions, references).mean()),
            "bleu4": bleu4(captions, references),
            "rouge_l": float(rouge_l(captions, references).mean()),
            "repetition": _mean(repeated),
            "zero_attention": _mean([(weights == 0).mean() for weights in attention]),
            "jensen_shannon": _mean([jensen_shannon(weights) for weights in attention]),
        }


class CaptionerTask(CaptionTask, SceneTask):
    """A `CaptionTask` on scenes of shapes."""

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        given = {"words": CAPTION_WORDS, "max_length": CAPTION_TOKENS - 2}
        if fixed := sorted(set(given) & set(options.set)):
            raise SaccadeError(
                f"--set {fixed[0]}: the captions of generated scenes determine it. Leave it out."
            )
        config = chosen_config(CaptionerConfig, options, self.recipe.config, given)
        if config.encoder != "cnn" or config.height_px != config.width_px or config.channels != 3:
            raise SaccadeError(
                f"--set encoder={config.encoder}, {config.height_px}x{config.width_px} px, "
                f"{config.channels} channels: shapes are square color images. Set encoder to cnn, "
                "height_px to width_px, and channels to 3."
            )
        self.model = new_model(Captioner, config)
        self.vocabulary = WordVocabulary(config.words)
        extra = self.recipe.extra
        self.draw(config.height_px, extra["report_images"])
        rng = np.random.default_rng(0)
        self.references = [
            [caption(objects, rng) for _ in range(REFERENCES)]
            for objects in self.validation.objects
        ]
        self.card = {"validation_images": extra["report_images"], "references": REFERENCES}

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w 3] uint8, and tokens [b t] of new captions with start and end.

        At first all scenes have one object, then fewer and fewer of them.
        """
        rows = self.training.rows(rng, self.recipe.batch, step / self.recipe.steps)
        texts = [caption(self.training.objects[row], rng) for row in rows]
        return self._batch(torch.from_numpy(self.training.images[rows]), texts)

    def validate(self) -> dict[str, float]:
        """Return the CIDEr-D of greedy captions, and the share of captions that are true."""
        images = self.validation.images[: self.recipe.extra["validate_images"]]
        captions, _ = self._captions(images, beam=1)
        references = self.references[: len(captions)]
        return {"cider": float(cider(captions, references).mean()), "true": self._true(captions)}

    def report(self) -> dict[str, float]:
        """Return all scores with the configured beam, and measures of the output attention."""
        captions, maps = self._captions(self.validation.images)
        scores = self._scores(captions, maps)
        attention = {name: scores.pop(name) for name in ("zero_attention", "jensen_shannon")}
        return {**scores, "true": self._true(captions), **attention}

    def _true(self, texts: list[str]) -> float:
        pairs = zip(texts, self.validation.objects, strict=False)
        return _mean([is_true(text, objects) for text, objects in pairs])

    def calibration(self) -> dict[str, np.ndarray]:
        """Return training scenes with one caption each."""
        rng = np.random.default_rng(0)
        shown = self.training.objects[:CALIBRATION_IMAGES]
        return {
            "image": self.training.images[:CALIBRATION_IMAGES],
            "tokens": self._tokens([caption(objects, rng) for objects in shown]),
        }


class OwnCaptionTask(CaptionTask, ImageTextsTask):
    """A `CaptionTask` on the user's images, each with one or more captions.

    The words are those of the training split. A batch has one caption of each of its images.
    """

    def __init__(self, options: TrainOptions) -> None:
        recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        self.recipe = with_counts(options, recipe, COUNTS)
        self.read(options, open_captions, captioned_split, CaptionerConfig.encoder)
        config = self._config(options)
        self.model = new_model(Captioner, config)
        self.vocabulary = WordVocabulary(config.words)
        shown = self.recipe.extra["report_images"]
        self.references = list(self.validation.captions[:shown])
        self.card = {
            "captions": sum(map(len, self.training.captions)),
            "words": len(config.words),
            "validation_images": len(self.references),
        }

    def _config(self, options: TrainOptions) -> CaptionerConfig:
        training = self.training
        owner = np.repeat(np.arange(len(training.captions)), [*map(len, training.captions)])
        texts = [text for group in training.captions for text in group]
        words = chosen_words(
            options, texts, lambda text: training.named(owner[text]), extra=self.recipe.extra
        )
        longest = options.value("max_length", longest_text(texts, _LONGEST))
        given = {
            "words": words,
            "max_length": longest,
            **encoder_fields(options, training.images, CaptionerConfig.encoder),
        }
        if grid := given.pop("grid", None):
            given |= {"grid_height": grid[0], "grid_width": grid[1]}
        else:
            given |= _cells(given["height_px"], given["width_px"])
        fields = self.recipe.config
        return chosen_config(CaptionerConfig, options, fields, given, known=tuple(COUNTS))

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w c] uint8, and tokens [b t] of one caption each."""
        captions, rows = self.training.captions, self._drawn(rng)
        texts = [captions[row][rng.integers(len(captions[row]))] for row in rows.tolist()]
        return self._batch(self.changes.chosen(rows, rng, then=self._drawn)[0], texts)

    def _drawn(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(len(self.training.captions), size=self.recipe.batch)

    def validate(self) -> dict[str, float]:
        """Return the CIDEr-D of greedy captions."""
        count = min(self.recipe.extra["validate_images"], len(self.references))
        captions, _ = self._captions(self._validated(count), beam=1)
        return {"cider": float(cider(captions, self.references[:count]).mean())}

    def report(self) -> dict[str, float]:
        """Return all scores with the configured beam, and measures of the output attention."""
        return self._scores(*self._captions(self._validated(len(self.references))))

    def _validated(self, count: int) -> np.ndarray:
        return np.asarray(self.validation.images[np.arange(count)])

    def calibration(self) -> dict[str, np.ndarray]:
        """Return training images with one caption each."""
        rows = calibration_rows(len(self.training.captions))
        images = np.asarray(self.training.images[rows])
        texts = [self.training.captions[row][0] for row in rows.tolist()]
        return {"image": images, "tokens": self._tokens(texts)}


def _cells(height_px: int, width_px: int) -> dict[str, Any]:
    """Return the fields of the small encoder for an image: a grid of 8 by 8, or of fewer cells.

    The sides of a cell are the product of three strides, large ones first.
    """
    cell = max(1, min(height_px, width_px) // _CELLS)
    strides = [1, 1, 1]
    rest, factor = cell, 2
    while rest > 1:
        if rest % factor:
            factor += 1
            continue
        strides[strides.index(min(strides))] *= factor
        rest //= factor
    return {
        "grid_height": max(1, height_px // cell),
        "grid_width": max(1, width_px // cell),
        "strides": tuple(sorted(strides, reverse=True)),
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
