# SPDX-License-Identifier: Apache-2.0
"""Accuracy of classification: from logits, from nearest neighbors, from a linear probe."""

import numpy as np

from saccade.errors import SaccadeError, ShapeError, require

_CHUNK = 512


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


def probe_predict(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    *,
    strength: float = 1.0,
    max_iterations: int = 1_000,
) -> np.ndarray:
    """Predict the class by logistic regression on codes scaled to mean 0 and variance 1.

    Units:  strength is the inverse of the L2 penalty's weight.
    Shapes: train [n d], train_labels [n], test [m d] -> [m] int64.
    Raises: ShapeError if the shapes do not fit, SaccadeError for fewer than two classes.
    """
    _check_labels("codes", train, train_labels)
    if len(np.unique(train_labels)) < 2:
        raise SaccadeError("linear probe: found one class in the data, expected at least two.")
    model = require("sklearn.linear_model", extra="bench")
    mean, spread = train.mean(0), train.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    probe = model.LogisticRegression(C=strength, max_iter=max_iterations)
    probe.fit((train - mean) / spread, train_labels)
    return np.asarray(probe.predict((test - mean) / spread), dtype=np.int64)


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)


def _check_labels(name: str, values: np.ndarray, labels: np.ndarray) -> None:
    if values.ndim != 2 or labels.shape != values.shape[:1] or not len(labels):
        raise ShapeError(
            f"{name} and labels: found shapes {values.shape} and {labels.shape}, expected one row "
            "and one label per sample, and at least one sample."
        )
