# SPDX-License-Identifier: Apache-2.0
"""Training of a captioner on scenes of shapes."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.errors import SaccadeError
from saccade.models.captioner.model import Captioner, CaptionerConfig
from saccade.models.data.captions import CAPTION_TOKENS, CAPTION_WORDS, caption
from saccade.models.data.scene_statements import is_true
from saccade.models.families import new_model
from saccade.models.scores.attention import jensen_shannon, repetition
from saccade.models.scores.captions import bleu4, cider, rouge_l
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.scene_mix import MIX, SceneTask, check_data
from saccade.models.training.task import Recipe
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


def task(options: TrainOptions) -> "CaptionerTask":
    """Train on shapes; `--set attention=softmax|sparsemax|tvmax` chooses the output attention.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    check_data(options, "captions of images")
    return CaptionerTask(options)


class CaptionerTask(SceneTask):
    """A `training.task.Task`: the cross entropy of each next word, given the true words."""

    family = "captioner"
    model: Captioner

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

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return images [b h w 3] uint8, and tokens [b t] of new captions with start and end.

        At first all scenes have one object, then fewer and fewer of them.
        """
        rows = self.training.rows(rng, self.recipe.batch, step / self.recipe.steps)
        tokens = self._tokens([caption(self.training.objects[row], rng) for row in rows])
        used = int((tokens != PAD).sum(1).max())
        return {
            "images": torch.from_numpy(self.training.images[rows]),
            "tokens": torch.from_numpy(tokens[:, :used]),
        }

    def _tokens(self, texts: list[str]) -> np.ndarray:
        return np.stack([self.vocabulary.encode(text, CAPTION_TOKENS) for text in texts])

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the cross entropy over the words and the end token."""
        tokens = batch["tokens"]
        logits, _ = self.model(batch["images"], tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)

    def weight(self, part: dict[str, Tensor]) -> float:
        """Return the number of words and end tokens."""
        return int((part["tokens"][:, 1:] != PAD).sum())

    def validate(self) -> dict[str, float]:
        """Return the CIDEr-D of greedy captions, and the share of captions that are true."""
        captions, _ = self._captions(self.recipe.extra["validate_images"], beam=1)
        references = self.references[: len(captions)]
        return {"cider": float(cider(captions, references).mean()), "true": self._true(captions)}

    def report(self) -> dict[str, float]:
        """Return all scores with the configured beam, and measures of the output attention."""
        captions, maps = self._captions(self.recipe.extra["report_images"])
        repeated = [
            repetition(text.split(), [text.split() for text in known])
            for text, known in zip(captions, self.references, strict=True)
        ]
        attention = [weights for weights in maps if len(weights)]  # not of empty captions
        return {
            "cider": float(cider(captions, self.references).mean()),
            "bleu4": bleu4(captions, self.references),
            "rouge_l": float(rouge_l(captions, self.references).mean()),
            "repetition": _mean(repeated),
            "true": self._true(captions),
            "zero_attention": _mean([(weights == 0).mean() for weights in attention]),
            "jensen_shannon": _mean([jensen_shannon(weights) for weights in attention]),
        }

    def _captions(self, count: int, beam: int | None = None) -> tuple[list[str], list[np.ndarray]]:
        captions = self.model.caption(self.validation.images[:count], beam=beam)
        return self.model.texts(captions), [caption.attention for caption in captions]

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


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
