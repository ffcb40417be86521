# SPDX-License-Identifier: Apache-2.0
"""What an embedding is worth: nearest neighbours and a linear probe."""

import numpy as np

from saccade.export.evaluation.classification import Labelled, labelled_inputs
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.subject import Subject
from saccade.models.scores.classification import knn_predict, probe_predict
from saccade.models.scores.results import Found, proportion


def knn(subject: Subject, options: EvaluateOptions) -> Found:
    """Top-1 of the weighted vote of the 20 nearest training images.

    Source: Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers.
    """
    train, test, codes = _embedded(subject, options)
    labels = knn_predict(codes[0], train.labels, codes[1], classes=len(test.class_names))
    return _found(subject, "knn", "20-NN top-1", test, labels)


def probe(subject: Subject, options: EvaluateOptions) -> Found:
    """Top-1 of logistic regression on the frozen embedding."""
    train, test, codes = _embedded(subject, options)
    labels = probe_predict(codes[0], train.labels, codes[1])
    return _found(subject, "probe", "linear probe top-1", test, labels)


def _found(subject: Subject, task: str, name: str, test: Labelled, labels: np.ndarray) -> Found:
    right = labels == test.labels
    scores = (proportion(name, right),)
    return Found(subject.name, task, test.name, test.sha256, scores, right.astype(np.float64))


def _embedded(
    subject: Subject, options: EvaluateOptions
) -> tuple[Labelled, Labelled, tuple[np.ndarray, np.ndarray]]:
    part = subject.part("", "image")
    train = labelled_inputs(subject, options, "train")
    test = labelled_inputs(subject, options, "test")
    train_codes, test_codes = (part(each.inputs)["embedding"] for each in (train, test))
    return train, test, (train_codes, test_codes)
