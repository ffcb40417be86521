# SPDX-License-Identifier: Apache-2.0
"""Top-1 and top-5 on labelled data."""

from dataclasses import dataclass

import numpy as np

from saccade.errors import SaccadeError, ShapeError
from saccade.export.artefact.variant_files import VariantParts
from saccade.export.evaluation.load_inputs import Inputs, images_of
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.subject import Subject
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.data.listops import CLASS_NAMES, Grammar, listops
from saccade.models.data.token_states import token_states
from saccade.models.scores.classification import correct
from saccade.models.scores.results import Found, proportion

_TOP5_CLASSES = 6  # with fewer, the right one is nearly always among five


@dataclass(frozen=True)
class Labelled:
    """One split as a model takes it.

    Shapes: inputs [n ...] by name, labels [n] int64.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    sha256: str


def top1(subject: Subject, options: EvaluateOptions) -> Found:
    """Share of samples whose most probable label is the right one.

    Raises: SaccadeError if the data's classes are not the model's.
    """
    data = _expressions(subject, options) or labelled_inputs(subject, options, "test")
    check_classes(subject, data.class_names, data.name)
    scores = subject.part("")(data.inputs)["logits"]
    right = correct(scores, data.labels)
    found = [proportion("top-1", right)]
    if scores.shape[-1] >= _TOP5_CLASSES:
        found.append(proportion("top-5", correct(scores, data.labels, top=5)))
    samples = right.astype(np.float64)
    return Found(subject.name, "top1", data.name, data.sha256, tuple(found), samples)


def labelled_inputs(subject: Subject, options: EvaluateOptions, split: str) -> Labelled:
    """One split of labelled images, or of token states where the model takes those.

    Raises: SaccadeError if the model takes neither, or the data does not fit it.
    """
    shapes = {spec.name: spec.shape for spec in subject.part("", "image").inputs}
    if "tokens" not in shapes:
        data = labelled_images(subject, options, split)
        inputs = {"image": data.images}
        return Labelled(inputs, data.labels, data.class_names, data.name, data.sha256)
    if options.data is None:
        raise SaccadeError(
            f"{subject.name}: takes token states, which are not generated here. Pass --data with "
            "an .npz of tokens, lengths and labels."
        )
    texts = token_states(options.data, split)
    if texts.tokens.shape[1:] != shapes["tokens"][1:]:
        raise ShapeError(
            f"{options.data}: token states are {texts.tokens.shape[1:]} (tokens, width), the model "
            f"wants {shapes['tokens'][1:]}. Pass the data that the model was trained for."
        )
    most = slice(options.limit)
    inputs = {name: each[most] for name, each in texts.inputs.items()}
    return Labelled(inputs, texts.labels[most], texts.class_names, texts.name, texts.sha256)


def labelled_images(subject: Subject, options: EvaluateOptions, split: str) -> Dataset:
    """One split of the data in the model's own size, its first `limit` images.

    Raises: SaccadeError if the model takes no image.
    """
    data = load_data(options.data or "shapes", split, preprocessing=subject.images())
    most = slice(options.limit)
    return Dataset(data.images[most], data.labels[most], data.class_names, data.name, data.sha256)


def check_classes(subject: Subject, names: tuple[str, ...], data: str) -> None:
    """Stop where the data's classes are others than the model's.

    Raises: SaccadeError.
    """
    # Classes without words are numbered: those are the model's own indices.
    numbered = names == tuple(str(index) for index in range(len(subject.labels)))
    if not numbered and names != subject.labels:
        raise SaccadeError(
            f"{data}: its {len(names)} classes begin with {names[:3]}, those of {subject.name} "
            f"({len(subject.labels)}) with {subject.labels[:3]}. "
            "Pass the data that the model was trained for with --data."
        )


def _expressions(subject: Subject, options: EvaluateOptions) -> Labelled | None:
    """ListOps, for a model that reads characters."""
    if all(spec.name != "characters" for spec in subject.part("").inputs):
        return None
    if options.data not in (None, "listops"):
        raise SaccadeError(
            f"--data {options.data}: {subject.name} reads characters, expected listops. "
            "Leave the option out."
        )
    grammar = Grammar(max_tokens=int(subject.facts["max_tokens"]))
    drawn = listops("test", options.limit, grammar=grammar)
    inputs = {"characters": drawn.characters, "length": drawn.length}
    return Labelled(inputs, drawn.labels, CLASS_NAMES, "listops", drawn.sha256)


def load_inputs(variant: VariantParts, data: str, count: int) -> Inputs:
    """The first samples of whatever the model takes: images, token states, characters.

    Shapes: by name [n ...], n at most `count`.
    Raises: SaccadeError if it takes what no data here has.
    """
    role, names = variant.main.variant.role, {spec.name for spec in variant.main.inputs}
    if "characters" in names:
        drawn = listops("test", count)
        return {role: {"characters": drawn.characters, "length": drawn.length}}
    if names == {"tokens", "length"}:
        texts = token_states(data, "test").inputs
        return {role: {name: each[:count] for name, each in texts.items()}}
    found = load_data(data, "test", preprocessing=images_of(variant))
    return {role: {"image": found.images[:count]}}
