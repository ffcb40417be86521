# SPDX-License-Identifier: Apache-2.0
"""How many questions are answered rightly, by kind, and how much of the image is left out."""

import numpy as np

from saccade.errors import SaccadeError
from saccade.export.artefact.variant_files import VariantParts
from saccade.export.evaluation.load_inputs import Inputs, images_of
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.scenes import QUESTIONS_A_SCENE, Asked, asked_scenes
from saccade.export.evaluation.subject import Subject
from saccade.models.scores.attention import zero_share
from saccade.models.scores.results import Found, mean, proportion
from saccade.models.vqa.questions import question_tokens


def vqa(subject: Subject, options: EvaluateOptions) -> Found:
    """Accuracy on the test scenes' questions, by kind, with the share of zero attention.

    Raises: SaccadeError if the model takes no image or has other answers.
    """
    asked = asked_scenes(subject.images(), options)
    answers = _answers(subject, asked)
    truth = _truth(subject, asked)
    right = answers["logits"].argmax(-1) == truth
    kinds = np.array([each.kind for each in asked.questions])
    scores = [proportion("accuracy", right)]
    scores += [proportion(kind, right[kinds == kind]) for kind in sorted(set(kinds.tolist()))]
    scores.append(mean("zero attention", zero_share(answers["attention"])))
    samples = right.astype(np.float64)
    return Found(subject.name, "vqa", asked.data, asked.sha256, tuple(scores), samples)


def _answers(subject: Subject, asked: Asked) -> dict[str, np.ndarray]:
    tokens = np.stack([question_tokens(subject.facts, each.text) for each in asked.questions])
    return subject.part("")({"image": asked.images[asked.owner], "question": tokens})


def _truth(subject: Subject, asked: Asked) -> np.ndarray:
    known = {label: index for index, label in enumerate(subject.labels)}
    if strange := sorted({each.answer for each in asked.questions} - set(known)):
        raise SaccadeError(
            f"{subject.name}: does not know the answer {strange[0]!r}, it has "
            f"{', '.join(subject.labels[:5])}, ... Score a model trained on this data."
        )
    return np.array([known[each.answer] for each in asked.questions])


def load_inputs(variant: VariantParts, data: str, count: int) -> Inputs:
    """The first questions with their images.

    Shapes: image [n h w c], question [n t], n at most `count`.
    Raises: SaccadeError if the model takes no image.
    """
    scenes = max(2, count // QUESTIONS_A_SCENE)
    asked = asked_scenes(images_of(variant), EvaluateOptions(limit=scenes))
    tokens = np.stack([question_tokens(variant.facts, each.text) for each in asked.questions])
    return {"": {"image": asked.images[asked.owner], "question": tokens}}
