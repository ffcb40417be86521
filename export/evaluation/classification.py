# SPDX-License-Identifier: Apache-2.0
"""Top-1 and top-5 on labelled data."""

import numpy as np

from saccade.export.evaluation.found import Found, proportion
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.subject import Subject
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.data.listops import CLASS_NAMES, Grammar, listops
from saccade.models.scores.classification import correct
from saccade.plugins.errors import SaccadeError

_TOP5_CLASSES = 6  # with fewer, the right one is nearly always among five


def top1(subject: Subject, options: EvaluateOptions) -> Found:
    """Share of samples whose most probable label is the right one.

    Raises: SaccadeError if the data's classes are not the model's.
    """
    inputs, labels, name, sha256 = _test_data(subject, options)
    scores = subject.part("")(inputs)["logits"]
    right = correct(scores, labels)
    found = [proportion("top-1", right)]
    if scores.shape[-1] >= _TOP5_CLASSES:
        found.append(proportion("top-5", correct(scores, labels, top=5)))
    return Found(subject.name, "top1", name, sha256, tuple(found), right.astype(np.float64))


def labelled_images(subject: Subject, options: EvaluateOptions, split: str) -> Dataset:
    """One split of the data in the model's own size, its first `limit` images.

    Raises: SaccadeError if the model takes no image.
    """
    if subject.preprocessing is None:
        raise SaccadeError(f"{subject.name}: takes no image. Choose another --task or --data.")
    data = load_data(options.data or "shapes", split, preprocessing=subject.preprocessing)
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


def _test_data(
    subject: Subject, options: EvaluateOptions
) -> tuple[dict[str, np.ndarray], np.ndarray, str, str]:
    if any(spec.name == "characters" for spec in subject.part("").inputs):
        if options.data not in (None, "listops"):
            raise SaccadeError(
                f"--data {options.data}: {subject.name} reads characters, expected listops. "
                "Leave the option out."
            )
        grammar = Grammar(max_tokens=int(subject.facts["max_tokens"]))
        drawn = listops("test", options.limit, grammar=grammar)
        check_classes(subject, CLASS_NAMES, "listops")
        inputs = {"characters": drawn.characters, "length": drawn.length}
        return inputs, drawn.labels, "listops", drawn.sha256
    data = labelled_images(subject, options, "test")
    check_classes(subject, data.class_names, data.name)
    return {"image": data.images}, data.labels, data.name, data.sha256
