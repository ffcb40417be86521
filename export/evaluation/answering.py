# SPDX-License-Identifier: Apache-2.0
"""Score visual question answering: accuracy by kind, and the share of ignored image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import note_once
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.classification import logits_of
from saccade.exporter.evaluation.decisions import Decider
from saccade.exporter.evaluation.evaluated_model import DataSplit, EvaluatedModel, chunks, origin
from saccade.exporter.evaluation.examples import ExampleAnswers, ExampleSamples, labelled_answers
from saccade.exporter.evaluation.scenes import QUESTIONS_A_SCENE, asked_scenes
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.image_texts import own_questions
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.answers import normalized
from saccade.models.scores.attention import zero_share
from saccade.models.scores.results import EvaluationResult, Score, mean, proportion
from saccade.models.vqa.questions import question_tokens

_CHUNK = 256  # questions answered at a time


@dataclass(frozen=True)
class Questions(DataSplit):
    """Questions about images of one split: question i is about image `owner[i]`.

    Shapes: images [n h w c] uint8, an array or `samples.images.Images`; owner [q] int64.
    """

    images: np.ndarray
    owner: np.ndarray
    texts: Sequence[str]
    truths: Sequence[Mapping[str, float]]  # accuracy of each answer that is right, or in part
    kinds: Sequence[str]
    types: Sequence[str] = ()  # of the user's questions, such as `how many`
    people: bool = False  # whether the answers are those of people, which may differ

    @property
    def best(self) -> list[str]:
        """Return the best answer to each question."""
        return [max(truth, key=lambda answer: truth[answer]) for truth in self.truths]

    def part(self, rows: np.ndarray) -> "Questions":
        """Return some questions; the hash stays that of all."""
        chosen: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in ("texts", "truths", "kinds", "types")
            if (values := getattr(self, name))
        }
        return replace(self, owner=self.owner[rows], **chosen)


def questions_of(preprocessing: Preprocessing, options: EvaluateOptions, split: str) -> Questions:
    """Return the questions of a split: generated for scenes, or the user's.

    Raises: SaccadeError if there are none.
    """
    if options.data in (None, "shapes"):
        asked = asked_scenes(preprocessing, options)
        texts, answers, kinds = (
            [getattr(question, name) for question in asked.questions]
            for name in ("text", "answer", "kind")
        )
        truths = [{answer: 1.0} for answer in answers]
        given = asked.images, asked.owner, texts, truths, kinds
        return Questions(*given, name=asked.data, digest=lambda: asked.sha256)
    drawn = own_questions(str(options.data), split, preprocessing, options.asked)
    source, places = drawn.source, drawn.places.tolist()
    return Questions(
        drawn.images,
        drawn.owner,
        list(drawn.texts()),
        [drawn.scores(question) for question in range(len(places))],
        [source.kind(place) for place in places],
        [source.type_of(place) for place in places],
        people=True,
        **origin(drawn),
    )


def vqa(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score accuracy on questions, by kind, and the share of zero attention.

    Of the user's questions, the accuracy is that against the answers of people; it is also given by
    type of question, with the share of questions whose answer the model knows.

    Raises: SaccadeError if the model takes no image or has other answers.
    """
    asked = questions_of(model.images(), options, options.split or HELD_OUT)
    if asked.people and options.limit is not None:
        asked = asked.part(np.arange(min(options.limit, len(asked.texts))))
    answers, zero = _answers(model, asked)
    right = _right(model, asked, answers)
    kinds = np.array(asked.kinds)
    score = mean if asked.people else proportion
    scores = [score("accuracy", right)]
    scores += [score(kind, right[kinds == kind]) for kind in sorted(set(asked.kinds))]
    if asked.people:
        scores += _by_type(asked, right)
        forms = set(_forms(model, asked))
        known = np.array([bool(forms & {*truth}) for truth in asked.truths])
        scores.append(proportion("answer known", known))
    scores.append(mean("zero attention", zero))
    return model.result("vqa", asked, scores, right)


def _by_type(asked: Questions, right: np.ndarray) -> list[Score]:
    """Return the accuracy of each type of question that the data names, in their order."""
    types = np.array(asked.types)
    named = sorted(set(asked.types) - {""})
    return [mean(f"type: {name}", right[types == name]) for name in named]


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model and all questions; two about one image are not independent draws.

    Raises: SaccadeError for a split of the scenes other than `test`, or if the model has other
        answers.
    """
    if split not in ("test", HELD_OUT) and options.data in (None, "shapes"):
        raise SaccadeError(
            f"--split {split}: questions are generated for the test scenes. Pass --split test."
        )
    asked = questions_of(model.images(), options, split)
    _check_known(model, asked)
    _, first = np.unique(asked.owner, return_index=True)
    if asked.people:  # the images of all questions may not fit into memory
        asked = asked.part(first[: options.limit])
        first = np.arange(len(asked.texts))
    labels = _best(model, asked)
    inputs = _inputs(model, asked, np.arange(len(asked.texts)))
    return Decider(logits_of(model), logits_of, inputs, labels, first, **origin(asked))


def _best(model: EvaluatedModel, asked: Questions) -> np.ndarray:
    """Return the place of each best answer among the model's; -1 for one that it does not have.

    Such questions stay: traffic has them too, and variants may disagree most on them.
    Shapes: -> [q].
    """
    index_of = {form: index for index, form in enumerate(_forms(model, asked))}
    labels = np.array([index_of.get(answer, -1) for answer in asked.best])
    if unknown := int((labels < 0).sum()):
        note_once(
            f"{asked.name}: {unknown:,} of {len(labels):,} questions have a best answer that the "
            "model does not have, so every variant is wrong"
        )
    return labels


def _forms(model: EvaluatedModel, asked: Questions) -> list[str]:
    """Return the model's answers in the form in which `truths` has answers."""
    return [normalized(label) for label in model.labels] if asked.people else list(model.labels)


def _answers(model: EvaluatedModel, asked: Questions) -> tuple[np.ndarray, np.ndarray]:
    """Return the answer to each question, and the share of its map that is zero.

    Shapes: -> both [q].
    """
    component, chosen, zero = model.component(""), [], []
    for rows in chunks(len(asked.texts), _CHUNK):
        outputs = component(_inputs(model, asked, rows))
        chosen.append(outputs["logits"].argmax(-1))
        zero.append(zero_share(outputs["attention"]))
    return np.concatenate(chosen), np.concatenate(zero)


def _right(model: EvaluatedModel, asked: Questions, answers: np.ndarray) -> np.ndarray:
    """Return how right each answer is, from 0 to 1."""
    _check_known(model, asked)
    forms = _forms(model, asked)
    scores = (
        truth.get(forms[place], 0.0) for place, truth in zip(answers, asked.truths, strict=True)
    )
    return np.array(list(scores), dtype=np.float64)


def _inputs(model: EvaluatedModel, asked: Questions, rows: np.ndarray) -> dict[str, np.ndarray]:
    tokens = _tokens(model.runtime_metadata, asked, rows)
    return {"image": asked.images[asked.owner[rows]], "question": tokens}


def _tokens(metadata: Mapping[str, Any], asked: Questions, rows: np.ndarray) -> np.ndarray:
    cut = asked.people  # people may ask more than a model reads
    return np.stack([question_tokens(metadata, asked.texts[row], truncate=cut) for row in rows])


def _check_known(model: EvaluatedModel, asked: Questions) -> None:
    """Check that the model has the answers of scenes, or some of the answers of people.

    Raises: SaccadeError if it does not.
    """
    answers = {answer for truth in asked.truths for answer in truth}
    strange = sorted(answers - set(_forms(model, asked)))
    if strange and (not asked.people or len(strange) == len(answers)):
        raise SaccadeError(
            f"{model.name}: does not know the answer {strange[0]!r}. Its answers are "
            f"{', '.join(model.labels[:5])}, ... Score a model trained on this data."
        )


def load_inputs(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first questions with their images.

    Shapes: image [n h w c], question [n t], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    scenes = max(2, count // QUESTIONS_A_SCENE)
    options = EvaluateOptions(data=data if data else None, limit=scenes, skip_bad=skip_bad)
    asked = questions_of(variant.images(), options, HELD_OUT)
    rows = np.arange(min(count, len(asked.texts)))
    tokens = _tokens(variant.runtime_metadata, asked, rows)
    return {"": {"image": asked.images[asked.owner[rows]], "question": tokens}}


def vqa_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return answers to the chosen questions."""
    asked = questions_of(models[0].images(), options, options.split or HELD_OUT)
    images = np.asarray(asked.images[asked.owner[chosen]])
    texts = [asked.texts[index] for index in chosen]
    answers = []
    for model in models:
        tokens = _tokens(model.runtime_metadata, asked, chosen)
        outputs = model.component("")({"image": images, "question": tokens})
        answers.append(labelled_answers(model, model.labels, outputs))
    return ExampleSamples(images, texts, [asked.best[index] for index in chosen]), answers
