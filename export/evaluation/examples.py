# SPDX-License-Identifier: Apache-2.0
"""Example test samples with the answer of every variant, for reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions, task_asked
from saccade.models.entry import imported
from saccade.models.families import entry_of

_DISAGREED, _AGREED = 8, 4  # samples of each kind, at most


@dataclass(frozen=True)
class VariantAnswer:
    """The answer of one variant; the text is empty if the answer is only known by its score.

    Shapes: focus [h w], the attention weight of each position, or the index of its slot if the type
        is an integer; None if the variant has neither.
    """

    text: str = ""
    confidence: float | None = None
    focus: np.ndarray | None = None


@dataclass(frozen=True)
class Example:
    """One test sample and the answers of all variants, in the order of the variants.

    Shapes: image uint8 [h w c], None for a model that reads text.
    """

    index: int
    image: np.ndarray | None
    question: str
    truth: str
    answers: tuple[VariantAnswer, ...]


@dataclass(frozen=True)
class ExampleSamples:
    """The chosen samples in the form of one task.

    Shapes: images uint8 [n h w c]; questions and truths n strings each, or empty.
    """

    images: np.ndarray | None
    questions: Sequence[str]
    truths: Sequence[str]


ExampleAnswers = tuple[ExampleSamples, Sequence[Sequence[VariantAnswer]]]


def examples_of(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    values: Mapping[str, np.ndarray],
) -> tuple[Example, ...]:
    """Choose samples on which the variants' scores differ most, and some on which they agree.

    Empty if the task has no examples.
    Shapes: values[variant] [n], one per test sample in the same order.
    """
    first = models[0]
    _, task = task_asked(first.family, options.task, first.name, first.components)
    if not task.examples:
        return ()
    chosen = chosen_samples([values[model.name] for model in models])
    ask: Callable[..., ExampleAnswers] = imported(task.examples)
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
    """Return the indices of the samples to show; those with the largest difference first.

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
) -> list[VariantAnswer]:
    """Return the most probable label of each sample, with its probability.

    Shapes: outputs["logits"] [n labels].
    """
    logits = np.asarray(outputs["logits"], dtype=np.float64)
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    likely = odds / odds.sum(-1, keepdims=True)
    focus = focus_of(model, outputs)
    return [
        VariantAnswer(
            labels[int(row.argmax())],
            round(float(row.max()), 4),
            None if focus is None else focus[place],
        )
        for place, row in enumerate(likely)
    ]


def focus_of(model: EvaluatedModel, outputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the attention map of each sample, if the family and the exported outputs have one.

    Shapes: -> [n h w].
    """
    reference = entry_of(model.family).focus
    if reference is None or model.preprocessing is None:
        return None
    size = (model.preprocessing.height_px, model.preprocessing.width_px)
    focus: np.ndarray | None = imported(reference)(model.runtime_metadata, outputs, size)
    return focus
