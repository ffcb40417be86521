# SPDX-License-Identifier: Apache-2.0
"""Some test samples with the answer of every variant, for a reader to look at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.tasks import task_asked
from saccade.models.entry import imported
from saccade.models.families import entry_of

_DISAGREED, _AGREED = 8, 4  # samples of each kind, at most


@dataclass(frozen=True)
class Answer:
    """Answer of one variant; the text is empty where only the score of the sample tells it.

    Shapes: focus [h w], the weight of each place that was looked at, or which slot it belongs to
    where its type is an integer; none where the variant does not say.
    """

    text: str = ""
    confidence: float | None = None
    focus: np.ndarray | None = None


@dataclass(frozen=True)
class Example:
    """One test sample, and the answers of all variants in their order.

    Shapes: image uint8 [h w c], none for a model that reads text.
    """

    index: int
    image: np.ndarray | None
    question: str
    truth: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Samples:
    """The chosen samples as one task asks them.

    Shapes: images uint8 [n h w c]; questions and truths of n texts, empty where there are none.
    """

    images: np.ndarray | None
    questions: Sequence[str]
    truths: Sequence[str]


Asked = tuple[Samples, Sequence[Sequence[Answer]]]


def examples_of(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    values: Mapping[str, np.ndarray],
) -> tuple[Example, ...]:
    """Samples on which the variants' scores differ, most first, and some on which they do not.

    None where the task does not show its samples.
    Shapes: values[variant] [n], of each test sample in the same order.
    """
    first = models[0]
    _, task = task_asked(first.family, options.task, first.name, first.components)
    if not task.examples:
        return ()
    chosen = chosen_samples([values[model.name] for model in models])
    ask: Callable[..., Asked] = imported(task.examples)
    samples, answers = ask(models, options, chosen)
    return tuple(
        Example(
            int(index),
            None if samples.images is None else samples.images[place],
            samples.questions[place] if samples.questions else "",
            samples.truths[place] if samples.truths else "",
            tuple(of_model[place] for of_model in answers),
        )
        for place, index in enumerate(chosen)
    )


def chosen_samples(values: Sequence[np.ndarray]) -> np.ndarray:
    """Indices of the samples to show: first those whose scores are furthest apart.

    Shapes: values [variants n] -> indices [at most 12].
    """
    stacked = np.stack(values)
    apart = stacked.max(0) - stacked.min(0)
    order = np.argsort(-apart, kind="stable")
    disagreed = order[apart[order] > 0][:_DISAGREED]
    agreed = np.flatnonzero(apart == 0)[:_AGREED]
    return np.concatenate([disagreed, agreed])


def labelled_answers(
    model: EvaluatedModel, labels: Sequence[str], outputs: Mapping[str, np.ndarray]
) -> list[Answer]:
    """The most probable label of each sample, and its probability.

    Shapes: outputs["logits"] [n labels].
    """
    logits = np.asarray(outputs["logits"], dtype=np.float64)
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    likely = odds / odds.sum(-1, keepdims=True)
    focus = focus_of(model, outputs)
    return [
        Answer(
            labels[int(row.argmax())],
            round(float(row.max()), 4),
            None if focus is None else focus[place],
        )
        for place, row in enumerate(likely)
    ]


def focus_of(model: EvaluatedModel, outputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Map of each sample, where the family and the exported outputs have one.

    Shapes: -> [n h w].
    """
    reference = entry_of(model.family).focus
    if reference is None or model.preprocessing is None:
        return None
    size = (model.preprocessing.height_px, model.preprocessing.width_px)
    focus: np.ndarray | None = imported(reference)(model.runtime_metadata, outputs, size)
    return focus
