# SPDX-License-Identifier: Apache-2.0
"""Training of a network that answers questions about scenes of shapes."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.errors import SaccadeError
from saccade.models.data.questions import (
    ANSWERS,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    Question,
    questions,
)
from saccade.models.families import new_model
from saccade.models.scores.attention import zero_share
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.scene_mix import MIX, SceneTask, check_data
from saccade.models.training.task import Recipe
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.model import VQA
from saccade.models.word_tokens import WordVocabulary

CALIBRATION_IMAGES = 256  # of 48x48 px: 1.7 MiB; a shipped file has at most 3
_VALIDATION_BATCH = 100  # scenes

EXTRA: dict[str, Any] = {
    "scenes": 8_000,  # drawn once; every batch has new questions about them
    **MIX,
    "questions": 4,  # per scene in a batch, so that its image is encoded only once
    "validate_scenes": 250,  # while training
    "report_scenes": 1_000,  # at the end
}
QUICK = Recipe(
    steps=900,
    batch=32,  # scenes
    learning_rate=1e-3,
    weight_decay=0.01,
    config={"dropout": 0.0},
    extra=EXTRA,
    validate_every=150,
)
SHIPPED = replace(
    QUICK,
    steps=3_500,
    warm_up_steps=200,
    ema=0.998,
    extra={**EXTRA, "scenes": 20_000, "singles": 5_000},
    validate_every=350,
)


def task(options: TrainOptions) -> "VQATask":
    """Train on shapes; `--set attention=softmax|sparsemax|tvmax` chooses the output attention.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    check_data(options, "questions with answers")
    return VQATask(options)


def answer_loss(logits: Tensor, answers: Tensor, kind: str) -> Tensor:
    """Return the cross entropy, or for `sigmoid` the binary one, summed over the answers.

    Shapes: logits [b a]; answers [b] int64, the right answer of each, or [b a], how right each is
            from 0 to 1 -> scalar, the mean over the questions.
    Source: the binary one as in the code of Martins et al. 2020 and in MCAN.
    """
    if kind == "softmax":
        return F.cross_entropy(logits, answers)
    scores = F.one_hot(answers, logits.shape[-1]) if answers.dim() == 1 else answers
    summed = F.binary_cross_entropy_with_logits(logits, scores.to(logits), reduction="sum")
    return summed / len(logits)


class VQATask(SceneTask):
    """A `training.task.Task`: predict the right answer, with the loss that fits `config.answer`."""

    family, labels = "vqa", ANSWERS
    model: VQA

    def __init__(self, options: TrainOptions) -> None:
        self.recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        self.vocabulary = WordVocabulary(QUESTION_WORDS)
        given = {
            "words": QUESTION_WORDS,
            "tokens": len(self.vocabulary),
            "question_length": QUESTION_TOKENS,
            "answers": len(ANSWERS),
        }
        config = chosen_config(VQAConfig, options, self.recipe.config, given)
        if config.features != "image" or config.height_px != config.width_px:
            raise SaccadeError(
                f"--set features={config.features}, {config.height_px}x{config.width_px} px: "
                "shapes are square images. Set features to image, and height_px to width_px."
            )
        self.model = new_model(VQA, config)
        extra = self.recipe.extra
        self.draw(config.height_px, extra["report_scenes"])
        rng = np.random.default_rng(0)
        self.asked = [
            questions(objects, rng, extra["questions"]) for objects in self.validation.objects
        ]
        self.card = {
            "validation_images": extra["report_scenes"],
            "validation_questions": sum(map(len, self.asked)),
        }

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return images [b s s 3] uint8, questions [n t] int64, and their images and answers.

        At first all scenes have one object, then fewer and fewer of them.
        """
        rows = self.training.rows(rng, self.recipe.batch, step / self.recipe.steps)
        count = self.recipe.extra["questions"]
        asked = [questions(self.training.objects[row], rng, count) for row in rows]
        return self._tensors(self.training.images[rows], asked)

    def _tensors(self, images: np.ndarray, asked: list[list[Question]]) -> dict[str, Tensor]:
        flat = [question for group in asked for question in group]
        tokens = np.stack(
            [self.vocabulary.encode(question.text, QUESTION_TOKENS) for question in flat]
        )
        used = int((tokens != 0).sum(1).max())
        of_image = np.repeat(np.arange(len(asked)), [len(group) for group in asked])
        answers = np.array([ANSWERS.index(question.answer) for question in flat])
        return {
            "images": torch.from_numpy(images),
            "question": torch.from_numpy(tokens[:, :used]),
            "of_image": torch.from_numpy(of_image),
            "answers": torch.from_numpy(answers),
        }

    def _answers(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        cells = self.model.cells(batch["images"])[batch["of_image"]]
        return self.model.details(cells=cells, question=batch["question"])

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the `answer_loss` of the batch's questions."""
        logits = self._answers(batch)["logits"]
        return answer_loss(logits, batch["answers"], self.model.config.answer)

    def part(self, batch: Any, index: int, count: int) -> Any:
        """Return a part of the images, with the questions about them."""
        images = super().part({"images": batch["images"]}, index, count)["images"]
        first = index * len(batch["images"]) // count
        of_image = batch["of_image"] - first
        asked = (of_image >= 0) & (of_image < len(images))
        about = {name: batch[name][asked] for name in ("question", "answers")}
        return {"images": images, **about, "of_image": of_image[asked]}

    def rows(self, part: Any) -> int:
        """Return the number of questions, to which dropout is applied."""
        return len(part["question"])

    def weight(self, part: Any) -> float:
        """Return the number of questions."""
        return len(part["question"])

    def validate(self) -> dict[str, float]:
        """Return the share of right answers."""
        right, _ = self._validated(self.recipe.extra["validate_scenes"])
        return {"top1": float(right.mean())}

    def report(self) -> dict[str, float]:
        """Return the share of right answers (also by kind) and of cells without attention."""
        count = self.recipe.extra["report_scenes"]
        right, zero = self._validated(count)
        by_kind = defaultdict(list)
        asked = [question for group in self.asked[:count] for question in group]
        for question, correct in zip(asked, right, strict=True):
            by_kind[question.kind].append(correct)
        kinds = {f"top1_{kind}": float(np.mean(by_kind[kind])) for kind in sorted(by_kind)}
        return {"top1": float(right.mean()), **kinds, "zero_attention": float(zero.mean())}

    def _validated(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Shapes: -> whether each answer is right, its map's share of zeros, both [questions]."""
        device = next(self.model.parameters()).device
        right, zero = [], []
        for start in range(0, count, _VALIDATION_BATCH):
            part = slice(start, min(count, start + _VALIDATION_BATCH))
            batch = self._tensors(self.validation.images[part], self.asked[part])
            batch = {name: value.to(device) for name, value in batch.items()}
            answers = self._answers(batch)
            right.append((answers["logits"].argmax(-1) == batch["answers"]).cpu().numpy())
            zero.append(zero_share(answers["attention"].float().cpu().numpy()))
        return np.concatenate(right), np.concatenate(zero)

    def calibration(self) -> dict[str, np.ndarray]:
        """Return validation scenes with one question each."""
        asked = [group[:1] for group in self.asked[:CALIBRATION_IMAGES]]
        tensors = self._tensors(self.validation.images[:CALIBRATION_IMAGES], asked)
        tokens = F.pad(tensors["question"], (0, QUESTION_TOKENS - tensors["question"].shape[1]))
        return {
            "image": self.validation.images[:CALIBRATION_IMAGES],
            "question": tokens.numpy(),
            "labels": tensors["answers"].numpy(),
        }
