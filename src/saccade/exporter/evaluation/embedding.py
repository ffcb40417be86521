# SPDX-License-Identifier: Apache-2.0
"""Score an embedding with nearest neighbors and with a linear probe."""

import numpy as np

from saccade.errors import SaccadeError
from saccade.exporter.evaluation.classification import Labelled, labelled_inputs
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.data.datasets import HELD_OUT
from saccade.models.scores.classification import knn_predict, probe_predict
from saccade.models.scores.results import EvaluationResult, proportion


def knn(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 of the weighted vote of the 20 nearest training images.

    Source: Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers.
    """
    train, test, codes = _embedded(model, options)
    labels = knn_predict(codes[0], train.labels, codes[1], classes=len(test.class_names))
    return _result(model, "knn", "20-NN top-1", test, labels)


def probe(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 of logistic regression on the frozen embedding."""
    train, test, codes = _embedded(model, options)
    labels = probe_predict(codes[0], train.labels, codes[1])
    return _result(model, "probe", "linear probe top-1", test, labels)


def _result(
    model: EvaluatedModel, task: str, name: str, test: Labelled, labels: np.ndarray
) -> EvaluationResult:
    right = labels == test.labels
    scores = (proportion(name, right),)
    return EvaluationResult(
        model.name,
        task,
        test.name,
        test.sha256,
        scores,
        right.astype(np.float64),
        split=test.split,
        skipped=test.skipped,
    )


def _embedded(
    model: EvaluatedModel, options: EvaluateOptions
) -> tuple[Labelled, Labelled, tuple[np.ndarray, np.ndarray]]:
    if options.split in ("train", "all"):
        raise SaccadeError(
            f"--split {options.split}: this task learns from the training samples, expected others "
            "to score. Pass --split validation or --split test."
        )
    component = model.component("", "image")
    train = labelled_inputs(model, options, "train")
    test = labelled_inputs(model, options, options.split or HELD_OUT)
    train_codes, test_codes = (component(split.inputs)["embedding"] for split in (train, test))
    return train, test, (train_codes, test_codes)
