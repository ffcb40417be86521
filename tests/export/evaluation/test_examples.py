# SPDX-License-Identifier: Apache-2.0
"""Sample answers are those that were scored, of shipped models at two budgets."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_checkpoint
from saccade.exporter.evaluation.examples import Example, examples_of
from saccade.exporter.evaluation.segmentation import masked_images
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.data.listops import CLASS_NAMES
from saccade.models.scores.ari import adjusted_rand_index


def asked(
    name: str, budgets: tuple[str, ...], limit: int, data: str
) -> tuple[list[EvaluatedModel], dict[str, np.ndarray], tuple[Example, ...]]:
    """The models, each sample's score, and the examples."""
    models = subjects_of_checkpoint(load(f"shipped:{name}"), budgets)
    options = EvaluateOptions(data, limit=limit)
    results = scores_of(models, options, lambda: None)
    values = {result.variant: result.samples for result in results}
    return models, values, examples_of(models, options, values)


@pytest.mark.parametrize(
    ("name", "budgets", "limit", "data", "looks"),
    [
        ("digits-sum", ("1", "0.015625"), 100, "digits-sum", True),
        ("sparo-shapes", ("1", "0.25"), 60, "shapes", True),
        ("vqa-shapes", ("1",), 12, "shapes", True),
        ("listops", ("1",), 12, "listops", False),
    ],
)
def test_an_answer_is_right_where_it_scored(name, budgets, limit, data, looks) -> None:
    models, values, examples = asked(name, budgets, limit, data)
    assert len(examples) >= 4
    for example in examples:
        for model, answer in zip(models, example.answers, strict=True):
            assert (answer.text == example.truth) == bool(values[model.name][example.index])
            assert 0 < answer.confidence <= 1
            assert (answer.focus is not None) == looks
            if looks:
                assert answer.focus.ndim == 2 and answer.focus.min() >= 0 < answer.focus.max()
    if len(models) == 2:  # what the variants disagree on comes first
        first = examples[0]
        assert len({answer.text for answer in first.answers}) == 2
    assert bool(examples[0].question) == (name in ("vqa-shapes", "listops"))
    if name == "listops":
        assert examples[0].truth in CLASS_NAMES and examples[0].question.startswith("[")
        assert examples[0].image is None


def test_slots_are_those_that_were_scored() -> None:
    models, values, examples = asked("slots-tetrominoes", ("t3", "t1"), 10, "tetrominoes")
    options = EvaluateOptions("tetrominoes", limit=10)
    data = masked_images(models[0].images(), options)
    images, masks = data.images, data.masks
    for example in examples:
        assert np.array_equal(example.image, images[example.index])
        for model, answer in zip(models, example.answers, strict=True):
            (score,) = adjusted_rand_index(
                masks[example.index][None], answer.focus[None], foreground=True
            )
            assert score == pytest.approx(values[model.name][example.index])


def test_captions_have_the_map_of_their_words() -> None:
    _, _, examples = asked("captioner-shapes", ("1",), 3, "shapes")
    for example in examples:
        (answer,) = example.answers
        assert answer.text.startswith("a ") and example.truth.startswith("a ")
        assert answer.focus.sum() == pytest.approx(1, abs=1e-4)


def test_a_task_that_does_not_show_its_samples_has_no_examples() -> None:
    models = subjects_of_checkpoint(load("shipped:sparo-shapes"), ("1",))
    options = EvaluateOptions("shapes", task="retrieval", limit=8)
    assert examples_of(models, options, {models[0].name: np.ones(8)}) == ()
    assert examples_of(models, replace(options, task="zero-shot"), {models[0].name: np.ones(8)})
