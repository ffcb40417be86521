# SPDX-License-Identifier: Apache-2.0
"""Accuracy of classification: from logits, from nearest neighbors, from a linear probe."""

import warnings
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, ShapeError, require

_CHUNK = 512
_ITERATIONS = 1_000  # of a probe


def correct(scores: np.ndarray, labels: np.ndarray, *, top: int = 1) -> np.ndarray:
    """Check if each label is among the `top` highest scores; an equal score counts as higher.

    Shapes: scores [n classes], labels [n] -> [n] bool.
    Raises: ShapeError if the shapes do not match, SaccadeError if top is below 1.
    """
    _check_labels("scores", scores, labels)
    if top < 1:
        raise SaccadeError(f"top-k accuracy: top is {top}, expected at least 1.")
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    # Written so that NaN is never right.
    return (~(scores < own)).sum(1) <= top


def knn_predict(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    *,
    k: int = 20,
    temperature: float = 0.07,
    classes: int | None = None,
) -> np.ndarray:
    """Return the class that the k nearest `train` codes vote for, with exp(cosine / temperature).

    Tied votes go to the lower class, tied distances to the earlier code. Without `classes`, their
    number follows from the largest label.
    Shapes: train [n d], train_labels [n], test [m d] -> [m] int64.
    Raises: ShapeError if the shapes do not fit.
    Source: Wu et al. 2018 and Caron et al. 2021 (DINO), their weighted 20-NN.
    """
    _check_labels("codes", train, train_labels)
    if test.ndim != 2 or test.shape[1] != train.shape[1]:
        raise ShapeError(
            f"codes: found {list(test.shape)} and those of train {list(train.shape)}, expected the "
            "same width. Take both from one model."
        )
    train, k = _unit(train), min(k, len(train))
    votes_of = np.eye(classes or int(train_labels.max()) + 1)[train_labels]
    predicted = []
    for start in range(0, len(test), _CHUNK):
        cosine = _unit(test[start : start + _CHUNK]) @ train.T
        nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
        weights = np.exp(np.take_along_axis(cosine, nearest, axis=1) / temperature)
        predicted.append((weights[..., None] * votes_of[nearest]).sum(1).argmax(1))
    return np.concatenate(predicted) if predicted else np.zeros(0, np.int64)


# Weights of the penalty: 8 per decade; the search begins at every second decade.
_PENALTIES = np.logspace(-6, 6, 97)
_FIRST_STEP = 16


def probe_predict(
    train: np.ndarray,
    train_labels: np.ndarray,
    validation: np.ndarray,
    validation_labels: np.ndarray,
    test: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Predict classes by logistic regression on codes of length 1; return them and the penalty.

    The weight of the L2 penalty is the one with the highest accuracy on the validation codes (the
    largest of several): seven weights from 1e-6 to 1e6, then halved distances around the best, down
    to 8 per decade. In the end, the validation codes are learned from, too.

    Shapes: train [n d], train_labels [n], validation [v d], validation_labels [v], test [m d] ->
            [m] int64.
    Units:  the penalty is lambda / 2 |w|^2, added to the sum of the losses.
    Raises: ShapeError if the shapes do not fit, SaccadeError for fewer than two classes.
    Source: Radford et al. 2021 (CLIP), appendix A.3, whose sweep Vani et al. 2024 (SPARO, appendix
            C.1) follow.
    """
    for codes, labels in ((train, train_labels), (validation, validation_labels)):
        _check_labels("codes", codes, labels)
    if len(np.unique(train_labels)) < 2:
        raise SaccadeError("linear probe: found one class in the data, expected at least two.")
    train, validation, test = _unit(train), _unit(validation), _unit(test)
    accuracies: dict[int, float] = {}

    def accuracy(place: int) -> float:
        if place not in accuracies:
            probe = _fitted(train, train_labels, float(_PENALTIES[place]))
            right = probe.predict(validation) == validation_labels
            accuracies[place] = float(np.mean(right))
        return accuracies[place]

    def best_of(places: range | tuple[int, ...]) -> int:
        return max(places, key=lambda place: (accuracy(place), place))

    last = len(_PENALTIES) - 1
    best, step = best_of(range(0, last + 1, _FIRST_STEP)), _FIRST_STEP // 2
    while step:
        best = best_of((max(0, best - step), best, min(last, best + step)))
        step //= 2
    penalty = float(_PENALTIES[best])
    both = np.concatenate([train_labels, validation_labels])
    probe = _fitted(np.concatenate([train, validation]), both, penalty)
    return np.asarray(probe.predict(test), dtype=np.int64), penalty


def _fitted(codes: np.ndarray, labels: np.ndarray, penalty: float) -> Any:
    linear = require("sklearn.linear_model", extra="bench")
    with warnings.catch_warnings():
        # Weak penalties stop at the limit of iterations, as in CLIP's protocol.
        warnings.simplefilter("ignore")
        return linear.LogisticRegression(C=1 / penalty, max_iter=_ITERATIONS).fit(codes, labels)


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)


def _check_labels(name: str, values: np.ndarray, labels: np.ndarray) -> None:
    if values.ndim != 2 or labels.shape != values.shape[:1] or not len(labels):
        raise ShapeError(
            f"{name} and labels: found shapes {values.shape} and {labels.shape}, expected one row "
            "and one label per sample, and at least one sample."
        )
