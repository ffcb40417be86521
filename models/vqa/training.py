# SPDX-License-Identifier: Apache-2.0
"""Training of a network that answers questions, about scenes of shapes or the user's images."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note_once
from saccade.models.data.image_texts import question_split
from saccade.models.data.samples.questions import open_questions
from saccade.models.data.scene_texts import (
    ANSWERS,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    Question,
    questions,
)
from saccade.models.data.splits import calibration_rows
from saccade.models.families import new_model
from saccade.models.scores.answers import KINDS, normalized, usual_answer
from saccade.models.scores.attention import zero_share
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
from saccade.models.training.task import Recipe, Task, share_of
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
    "validate_questions": 1_000,  # the same, of the user's data
    "report_questions": 20_000,
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


# Of the user's data. Answers as many as in MCAN's code.
COUNTS = {"most_words": 19_996, "word_count": 1, "most_answers": 3_129, "answer_count": 1}
_LONGEST = 40  # tokens of a question; what is longer is cut


def task(options: TrainOptions) -> "QuestionTask":
    """Train on shapes or own data; `--set attention=softmax|sparsemax|tvmax` chooses the output's.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    own = options.data not in (None, "shapes")
    return OwnQuestionTask(options) if own else VQATask(options)


def answer_loss(logits: Tensor, answers: Tensor, kind: str) -> Tensor:
    """Return the cross entropy, or for `sigmoid` the binary one, summed over the answers.

    Shapes: logits [b a]; answers [b] int64, the right answer of each, or [b a], how right each is
            from 0 to 1 -> scalar, the mean over the questions.
    Source: the binary one as in the code of Martins et al. 2021 and in MCAN.
    """
    if kind == "softmax":
        return F.cross_entropy(logits, answers)
    scores = F.one_hot(answers, logits.shape[-1]) if answers.dim() == 1 else answers
    summed = F.binary_cross_entropy_with_logits(logits, scores.to(logits), reduction="sum")
    return summed / len(logits)


class QuestionTask(Task):
    """A `training.task.Task`: predict the right answer, with the loss that fits `config.answer`."""

    family = "vqa"
    model: VQA
    vocabulary: WordVocabulary

    def _tensors(self, images: Any, asked: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return images [b s s c], the questions [n t] about them, and the image of each [n]."""
        length = self.model.config.question_length
        texts = [text for group in asked for text in group]
        tokens = np.stack([self.vocabulary.encode(text, length, truncate=True) for text in texts])
        used = int((tokens != 0).sum(1).max())
        of_image = np.repeat(np.arange(len(asked)), [len(group) for group in asked])
        return {
            "images": torch.from_numpy(images) if isinstance(images, np.ndarray) else images,
            "question": torch.from_numpy(tokens[:, :used]),
            "of_image": torch.from_numpy(of_image),
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
        first = share_of(len(batch["images"]), index, count).start
        of_image = batch["of_image"] - first
        asked = (of_image >= 0) & (of_image < len(images))
        about = {name: batch[name][asked] for name in ("question", "answers")}
        return {"images": images, **about, "of_image": of_image[asked]}

    def weight(self, part: Any) -> float:
        """Return the number of questions."""
        return len(part["question"])

    def _predicted(
        self, images: np.ndarray, asked: Sequence[Sequence[str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shapes: -> the answer to each question and its map's share of zeros, both [questions]."""
        device = next(self.model.parameters()).device
        chosen, zero = [], []
        for start in range(0, len(asked), _VALIDATION_BATCH):
            places = np.arange(start, min(start + _VALIDATION_BATCH, len(asked)))
            batch = self._tensors(images[places], asked[start : start + _VALIDATION_BATCH])
            answers = self._answers({name: value.to(device) for name, value in batch.items()})
            chosen.append(answers["logits"].argmax(-1).cpu().numpy())
            zero.append(zero_share(answers["attention"].float().cpu().numpy()))
        return np.concatenate(chosen), np.concatenate(zero)

    def _calibration(
        self, images: np.ndarray, texts: Sequence[str], answers: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return images with one question each."""
        question = self._tensors(images, [[text] for text in texts])["question"]
        missing = self.model.config.question_length - question.shape[1]
        return {
            "image": images,
            "question": F.pad(question, (0, missing)).numpy(),
            "labels": answers,
        }


class VQATask(QuestionTask, SceneTask):
    """A `QuestionTask` on scenes of shapes."""

    labels = ANSWERS

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

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b s s 3] uint8, questions [n t] int64, and their images and answers.

        At first all scenes have one object, then fewer and fewer of them.
        """
        rows = self.training.rows(rng, self.recipe.batch, step / self.recipe.steps)
        count = self.recipe.extra["questions"]
        asked = [questions(self.training.objects[row], rng, count) for row in rows]
        batch = self._tensors(self.training.images[rows], _texts(asked))
        return batch | {"answers": torch.from_numpy(_right(asked))}

    def validate(self) -> dict[str, float]:
        """Return the share of right answers."""
        right, _ = self._validated(self.recipe.extra["validate_scenes"])
        return {"top1": float(right.mean())}

    def report(self) -> dict[str, float]:
        """Return the share of right answers (also by kind) and of cells without attention."""
        count = self.recipe.extra["report_scenes"]
        right, zero = self._validated(count)
        by_kind = _means([each.kind for group in self.asked[:count] for each in group], right)
        kinds = {f"top1_{kind}": mean for kind, mean in by_kind.items()}
        return {"top1": float(right.mean()), **kinds, "zero_attention": float(zero.mean())}

    def _validated(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Shapes: -> whether each answer is right, its map's share of zeros, both [questions]."""
        asked = self.asked[:count]
        chosen, zero = self._predicted(self.validation.images, _texts(asked))
        return chosen == _right(asked), zero

    def calibration(self) -> dict[str, np.ndarray]:
        """Return validation scenes with one question each."""
        asked = [group[:1] for group in self.asked[:CALIBRATION_IMAGES]]
        images = self.validation.images[:CALIBRATION_IMAGES]
        return self._calibration(images, [group[0].text for group in asked], _right(asked))


def _texts(asked: Sequence[Sequence[Question]]) -> list[list[str]]:
    return [[question.text for question in group] for group in asked]


def _right(asked: Sequence[Sequence[Question]]) -> np.ndarray:
    return np.array([ANSWERS.index(question.answer) for group in asked for question in group])


class OwnQuestionTask(QuestionTask, ImageTextsTask):
    """A `QuestionTask` on the user's images, with the answers of one or more people.

    Words and answers are those of the training split. A question without a known answer is left
    out, but under binary losses (`--set answer=sigmoid`) every answer is wrong for it, as in MCAN.
    """

    def __init__(self, options: TrainOptions) -> None:
        recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        self.recipe = with_counts(options, recipe, COUNTS)
        name = str(options.data)
        given = self.read(options, open_questions, question_split, VQAConfig.encoder)
        self.labels = given.labels or self._frequent_answers(name)
        self.model = new_model(VQA, self._config(options))
        self._index(binary=self.model.config.answer == "sigmoid")
        self._shown = _by_image(self.validation.owner)

    def _frequent_answers(self, name: str) -> tuple[str, ...]:
        """Return the most frequent usual answers, one per question, that occur often enough."""
        extra, source = self.recipe.extra, self.training.source
        counted = Counter(usual_answer(source.answers(place)) for place in self.training.places)
        least = extra["answer_count"]
        kept = [(-count, text) for text, count in counted.items() if text and count >= least]
        if len(kept) < 2:
            raise SaccadeError(
                f"--data {name}: found {len(kept)} answers that occur at least {least} times in "
                "the training split, expected 2 or more. Lower --set answer_count, or add "
                "questions."
            )
        return tuple(text for _, text in sorted(kept)[: extra["most_answers"]])

    def _config(self, options: TrainOptions) -> VQAConfig:
        training, extra = self.training, self.recipe.extra
        texts = list(training.texts())
        words = chosen_words(options, texts, training.named, extra=extra)
        self.vocabulary = WordVocabulary(words)
        length = longest_text(texts, _LONGEST) + 2
        given = {
            "words": words,
            "tokens": len(self.vocabulary),
            "question_length": options.value("question_length", length),
            "answers": len(self.labels),
            **encoder_fields(options, training.images, VQAConfig.encoder),
        }
        fields = self.recipe.config
        return chosen_config(VQAConfig, options, fields, given, known=tuple(COUNTS))

    def _index(self, *, binary: bool) -> None:
        """Prepare the known answers of each training question, and its scores."""
        self._forms = [normalized(label) for label in self.labels]
        known = {form: index for index, form in enumerate(self._forms)}
        ids, scores = array("q"), array("f")
        ends = array("q", [0])
        for question in range(len(self.training.places)):
            for answer, score in self.training.scores(question).items():
                if answer in known:
                    ids.append(known[answer])
                    scores.append(score)
            ends.append(len(ids))
        self._ids, self._scores = np.array(ids), np.array(scores)
        self._ends, self._binary = np.array(ends), binary
        self._known = np.flatnonzero(np.diff(self._ends))
        usable = np.arange(len(self.training.places)) if binary else self._known
        if not len(self._known):
            raise SaccadeError(
                f"--data {self.data}: found no training question with one of the "
                f"{len(self.labels)} answers of --labels. Correct the list, or leave it out."
            )
        self._groups = [usable[group] for group in _by_image(self.training.owner[usable])]
        foreign = len(self.training.places) - len(self._known)
        self.card = {
            "questions": {
                "train": len(self.training.places),
                "validation": len(self.validation.places),
            },
            "answers": len(self.labels),
            "words": len(self.vocabulary.words),
            "unknown_answers": foreign,
        }
        if foreign:
            then = "count as wrong for all answers" if binary else "are left out"
            note_once(
                f"{self.data}: {foreign:,} of {len(self.training.places):,} training questions "
                f"have no answer among the {len(self.labels):,} of the model; they {then}"
            )

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w c] uint8, questions [n t] int64, and their images and answers."""
        chosen = self._drawn(rng)
        count = self.recipe.extra["questions"]
        asked = [rng.permutation(group)[:count] for group in chosen]
        images, _ = self.changes.chosen(
            self._places(chosen), rng, then=lambda rng: self._places(self._drawn(rng))
        )
        texts = [[self._text(question) for question in group] for group in asked]
        answers = self._targets(np.concatenate(asked))
        return self._tensors(images, texts) | {"answers": torch.from_numpy(answers)}

    def _drawn(self, rng: np.random.Generator) -> list[np.ndarray]:
        drawn = rng.integers(len(self._groups), size=self.recipe.batch)
        return [self._groups[place] for place in drawn.tolist()]

    def _places(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        return self.training.owner[[group[0] for group in groups]]

    def _text(self, question: int) -> str:
        return self.training.source.texts[self.training.places[question]]

    def _targets(self, asked: np.ndarray) -> np.ndarray:
        """Shapes: [n] -> how right each answer is [n answers], or the best answer [n]."""
        soft = np.zeros((len(asked), len(self.labels)), dtype=np.float32)
        for row, question in enumerate(asked):
            part = slice(self._ends[question], self._ends[question + 1])
            soft[row, self._ids[part]] = self._scores[part]
        return soft if self._binary else soft.argmax(-1)

    def validate(self) -> dict[str, float]:
        """Return the accuracy against the answers that people gave."""
        right, _, _ = self._validated(self.recipe.extra["validate_questions"])
        return {"accuracy": float(right.mean())}

    def report(self) -> dict[str, float]:
        """Return the accuracy, also by kind of answer, and the share of cells without attention.

        The card gets the accuracy by type of question.
        """
        right, asked, zero = self._validated(self.recipe.extra["report_questions"])
        source = self.validation.source
        places = self.validation.places[asked]
        kinds = _means([source.kind(place) for place in places], right)
        types = _means([source.type_of(place) for place in places], right)
        types.pop("", None)
        if types:
            self.card = {**self.card, "accuracy_by_question_type": types}
        named = {
            f"accuracy_{kind.replace('/', '_')}": kinds[kind] for kind in KINDS if kind in kinds
        }
        return {"accuracy": float(right.mean()), **named, "zero_attention": float(zero.mean())}

    def _validated(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return scores of the answers, their questions, and the maps' shares of zeros.

        Shapes: each [questions], at most `count` unless one image has more.
        """
        sizes = np.cumsum([len(group) for group in self._shown])
        groups = self._shown[: max(1, int(np.searchsorted(sizes, count, side="right")))]
        asked = np.concatenate(groups)
        source, places = self.validation.source, self.validation.places
        texts = [[source.texts[places[question]] for question in group] for group in groups]
        chosen, zero = self._predicted(self.validation.images, texts)
        right = [
            self.validation.scores(question).get(self._forms[answer], 0.0)
            for question, answer in zip(asked, chosen, strict=True)
        ]
        return np.array(right), asked, zero

    def calibration(self) -> dict[str, np.ndarray]:
        """Return training images with one question each, whose answer the model knows."""
        asked = self._known[calibration_rows(len(self._known))]
        images = np.asarray(self.training.images[self.training.owner[asked]])
        answers = self._targets(asked)
        answers = answers.argmax(-1) if self._binary else answers
        return self._calibration(images, [self._text(question) for question in asked], answers)


def _by_image(owner: np.ndarray) -> list[np.ndarray]:
    """Return the places of each image's questions, in the order of the images.

    Shapes: owner [q].
    """
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)


def _means(names: Sequence[str], values: np.ndarray) -> dict[str, float]:
    grouped: dict[str, list[float]] = defaultdict(list)
    for name, value in zip(names, values.tolist(), strict=True):
        grouped[name].append(value)
    return {name: float(np.mean(grouped[name])) for name in sorted(grouped)}
