# SPDX-License-Identifier: Apache-2.0
"""Score top-1 and top-5 accuracy on labeled data."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.errors import SaccadeError, ShapeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.decisions import Decider
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.examples import Asked, Samples, labelled_answers
from saccade.exporter.evaluation.load_inputs import Inputs, images_of
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.data.listops import CLASS_NAMES, VOCABULARY, Grammar, listops
from saccade.models.data.token_states import token_states
from saccade.models.data.user_data import is_unlabelled, unlabelled_images
from saccade.models.interface import Arrays
from saccade.models.scores.classification import correct
from saccade.models.scores.results import EvaluationResult, proportion

_TOP5_CLASSES = 6  # with fewer classes, top-5 is nearly always right


@dataclass(frozen=True)
class Labelled:
    """One split of the data in the form of the model's inputs.

    Shapes: inputs [n ...] by name, labels [n] int64.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    sha256: str


def top1(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score the share of samples whose most probable label is correct.

    Raises: SaccadeError if the data's classes differ from the model's.
    """
    data = test_inputs(model, options)
    check_classes(model, data.class_names, data.name)
    scores = model.component("")(data.inputs)["logits"]
    right = correct(scores, data.labels)
    proportions = [proportion("top-1", right)]
    if scores.shape[-1] >= _TOP5_CLASSES:
        proportions.append(proportion("top-5", correct(scores, data.labels, top=5)))
    samples = right.astype(np.float64)
    return EvaluationResult(model.name, "top1", data.name, data.sha256, tuple(proportions), samples)


def test_inputs(model: EvaluatedModel, options: EvaluateOptions) -> Labelled:
    """Return the samples for top-1: images, token states or ListOps, depending on the model.

    Raises: SaccadeError if the data does not fit it.
    """
    return split_inputs(model, options, "test")


def split_inputs(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Labelled:
    """The samples of one split, whatever the model takes.

    Raises: SaccadeError if the data does not fit it.
    """
    return _expressions(model, options, split) or labelled_inputs(model, options, split)


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model and the samples of one split, with the labels where the data has some.

    Raises: SaccadeError if the data's classes are not the model's.
    """

    def run(inputs: Arrays) -> np.ndarray:
        return model.component("").run(inputs)["logits"]

    if options.data is not None and is_unlabelled(Path(options.data)):
        images = unlabelled_images(Path(options.data), model.images())
        digest = hashlib.sha256(images.tobytes()).hexdigest()
        return Decider(run, {"image": images}, None, Path(options.data).name, digest)
    data = split_inputs(model, options, split)
    check_classes(model, data.class_names, data.name)
    return Decider(run, data.inputs, data.labels, data.name, data.sha256)


def labelled_inputs(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Labelled:
    """Return one split of labeled images, or of token states if the model takes those.

    Raises: SaccadeError if the model takes neither, or the data does not fit it.
    """
    shapes = {spec.name: spec.shape for spec in model.component("", "image").inputs}
    if "tokens" not in shapes:
        data = labelled_images(model, options, split)
        inputs = {"image": data.images}
        return Labelled(inputs, data.labels, data.class_names, data.name, data.sha256)
    if options.data is None:
        raise SaccadeError(
            f"{model.name}: takes token states, which saccade cannot generate. Pass --data with "
            "an .npz of tokens, lengths and labels."
        )
    texts = token_states(options.data, split)
    if texts.tokens.shape[1:] != shapes["tokens"][1:]:
        raise ShapeError(
            f"{options.data}: token states are {texts.tokens.shape[1:]} (tokens, width), expected "
            f"{shapes['tokens'][1:]}. Pass the data that the model was trained on."
        )
    most = slice(options.limit)
    inputs = {name: array[most] for name, array in texts.inputs.items()}
    return Labelled(inputs, texts.labels[most], texts.class_names, texts.name, texts.sha256)


def labelled_images(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Dataset:
    """Return the first `limit` images of one split, in the model's size.

    Raises: SaccadeError if the model takes no image.
    """
    data = load_data(options.data or "shapes", split, preprocessing=model.images())
    most = slice(options.limit)
    return Dataset(data.images[most], data.labels[most], data.class_names, data.name, data.sha256)


def check_classes(model: EvaluatedModel, names: tuple[str, ...], data: str) -> None:
    """Check that the data's classes are the model's.

    Raises: SaccadeError if they differ.
    """
    # Classes without names are numbered, in the order of the model's outputs.
    numbered = names == tuple(str(index) for index in range(len(model.labels)))
    if not numbered and names != model.labels:
        raise SaccadeError(
            f"{data}: found {len(names)} classes ({_first_names(names)}), expected the "
            f"{len(model.labels)} labels of {model.name} ({_first_names(model.labels)}). Pass "
            "other data with --data, or name its classes (for images, their folders) as the labels."
        )


def _first_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _expressions(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Labelled | None:
    """Return ListOps expressions for a model that reads characters, otherwise None."""
    if all(spec.name != "characters" for spec in model.component("").inputs):
        return None
    if options.data not in (None, "listops"):
        raise SaccadeError(
            f"--data {options.data}: {model.name} reads characters, expected listops. "
            "Leave out --data."
        )
    grammar = Grammar(max_tokens=int(model.runtime_metadata["max_tokens"]))
    drawn = listops(split, options.limit, grammar=grammar)
    inputs = {"characters": drawn.characters, "length": drawn.length}
    return Labelled(inputs, drawn.labels, CLASS_NAMES, "listops", drawn.sha256)


def load_inputs(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first samples that fit the model: images, token states or characters.

    Shapes: by name [n ...], n at most `count`.
    Raises: SaccadeError if no data fits the model.
    """
    role, names = variant.main.variant.role, {spec.name for spec in variant.main.inputs}
    if "characters" in names:
        drawn = listops("test", count)
        return {role: {"characters": drawn.characters, "length": drawn.length}}
    if names == {"tokens", "length"}:
        texts = token_states(data, "test").inputs
        return {role: {name: array[:count] for name, array in texts.items()}}
    dataset = load_data(data, "test", preprocessing=images_of(variant))
    return {role: {"image": dataset.images[:count]}}


def labelled_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> Asked:
    """Return the most probable label of the chosen images or expressions."""
    data = test_inputs(models[0], options)
    inputs = {name: array[chosen] for name, array in data.inputs.items()}
    truths = [data.class_names[label] for label in data.labels[chosen]]
    samples = Samples(inputs.get("image"), _as_text(inputs), truths)
    answers = [
        labelled_answers(model, data.class_names, model.component("")(inputs)) for model in models
    ]
    return samples, answers


def _as_text(inputs: dict[str, np.ndarray]) -> list[str]:
    """Return the text that a model of characters reads; empty for images."""
    if "characters" not in inputs:
        return []
    rows = zip(inputs["characters"], inputs["length"], strict=True)
    return [" ".join(VOCABULARY[code] for code in row[: int(length)]) for row, length in rows]
