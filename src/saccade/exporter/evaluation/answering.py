# SPDX-License-Identifier: Apache-2.0
"""Score visual question answering: accuracy by kind, and the share of ignored image."""

from collections.abc import Sequence

import numpy as np

from saccade.errors import SaccadeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.decisions import Decider
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.examples import Asked, Samples, labelled_answers
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.scenes import QUESTIONS_A_SCENE, SceneQuestions, asked_scenes
from saccade.models.interface import Arrays
from saccade.models.scores.attention import zero_share
from saccade.models.scores.results import EvaluationResult, mean, proportion
from saccade.models.vqa.questions import question_tokens


def vqa(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score accuracy on questions about the test scenes, by kind, and the share of zero attention.

    Raises: SaccadeError if the model takes no image or has other answers.
    """
    asked = asked_scenes(model.images(), options)
    answers = _answers(model, asked)
    truth = _truth(model, asked)
    right = answers["logits"].argmax(-1) == truth
    kinds = np.array([question.kind for question in asked.questions])
    scores = [proportion("accuracy", right)]
    scores += [proportion(kind, right[kinds == kind]) for kind in sorted(set(kinds.tolist()))]
    scores.append(mean("zero attention", zero_share(answers["attention"])))
    samples = right.astype(np.float64)
    return EvaluationResult(model.name, "vqa", asked.data, asked.sha256, tuple(scores), samples)


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model and all questions; two about one scene are not independent draws.

    Raises: SaccadeError for a split other than `test`, or if the model has other answers.
    """
    if split != "test":
        raise SaccadeError(
            f"--split {split}: questions are generated for the test scenes. Pass --split test."
        )
    asked = asked_scenes(model.images(), options)
    _, first = np.unique(asked.owner, return_index=True)

    def run(inputs: Arrays) -> np.ndarray:
        return model.component("").run(inputs)["logits"]

    truth = _truth(model, asked)
    return Decider(run, _inputs(model, asked), truth, asked.data, asked.sha256, first)


def _answers(model: EvaluatedModel, asked: SceneQuestions) -> dict[str, np.ndarray]:
    return model.component("")(_inputs(model, asked))


def _inputs(model: EvaluatedModel, asked: SceneQuestions) -> dict[str, np.ndarray]:
    tokens = np.stack(
        [question_tokens(model.runtime_metadata, question.text) for question in asked.questions]
    )
    return {"image": asked.images[asked.owner], "question": tokens}


def _truth(model: EvaluatedModel, asked: SceneQuestions) -> np.ndarray:
    known = {label: index for index, label in enumerate(model.labels)}
    if strange := sorted({question.answer for question in asked.questions} - set(known)):
        raise SaccadeError(
            f"{model.name}: does not know the answer {strange[0]!r}. Its answers are "
            f"{', '.join(model.labels[:5])}, ... Score a model trained on this data."
        )
    return np.array([known[question.answer] for question in asked.questions])


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first questions with their images.

    Shapes: image [n h w c], question [n t], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    scenes = max(2, count // QUESTIONS_A_SCENE)
    asked = asked_scenes(images_of(variant), EvaluateOptions(limit=scenes))
    tokens = np.stack(
        [question_tokens(variant.runtime_metadata, question.text) for question in asked.questions]
    )
    return {"": {"image": asked.images[asked.owner], "question": tokens}}


def vqa_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> Asked:
    """Return answers to questions about the chosen scenes."""
    asked = asked_scenes(models[0].images(), options)
    images = asked.images[asked.owner[chosen]]
    chosen_questions = [asked.questions[index] for index in chosen]
    texts = [question.text for question in chosen_questions]
    answers = []
    for model in models:
        tokens = np.stack([question_tokens(model.runtime_metadata, text) for text in texts])
        outputs = model.component("")({"image": images, "question": tokens})
        answers.append(labelled_answers(model, model.labels, outputs))
    return Samples(images, texts, [question.answer for question in chosen_questions]), answers
