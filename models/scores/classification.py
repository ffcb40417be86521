# SPDX-License-Identifier: Apache-2.0
"""How often a class is right: from logits, from nearest neighbours, from a linear probe."""

import numpy as np

from saccade.plugins.errors import SaccadeError, ShapeError, require

_CHUNK = 512


def top_k_correct(logits: np.ndarray, labels: np.ndarray, k: int = 1) -> np.ndarray:
    """Whether the label is among the k highest logits; an equal logit counts as higher.

    Shapes: logits [n classes], labels [n] -> [n] bool.
    Raises: ShapeError if the shapes do not fit, SaccadeError for k below 1.
    """
    _check_labels("logits", logits, labels)
    if k < 1:
        raise SaccadeError(f"top-k: k is {k}, expected at least 1.")
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    # Written so that NaN is never right.
    return (~(logits < own)).sum(1) <= k


def macro_accuracy(correct: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the classes of the share that is right, each class counting the same.

    Shapes: correct [n], labels [n]; classes without a sample do not count.
    Raises: ShapeError if the lengths differ or there is no sample.
    """
    if correct.shape != labels.shape or not len(labels):
        raise ShapeError(
            f"correct and labels: found shapes {correct.shape} and {labels.shape}, expected two "
            "vectors of one length with at least one sample."
        )
    counts = np.bincount(labels)
    right = np.bincount(labels, weights=correct, minlength=len(counts))
    return float(np.mean(right[counts > 0] / counts[counts > 0]))


def knn_predictions(
    known: np.ndarray,
    known_labels: np.ndarray,
    asked: np.ndarray,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> np.ndarray:
    """The class that the k nearest known codes vote for, each with exp(cosine / temperature).

    Ties of votes go to the lower class, ties of distance to the earlier code.
    Shapes: known [n d], known_labels [n], asked [m d] -> [m] int64.
    Raises: ShapeError if the shapes do not fit.
    Source: Wu et al. 2018 and Caron et al. 2021 (DINO), their weighted 20-NN.
    """
    _check_labels("codes", known, known_labels)
    if asked.ndim != 2 or asked.shape[1] != known.shape[1]:
        raise ShapeError(
            f"codes: found {list(asked.shape)} and known ones {list(known.shape)}, expected the "
            "same width. Take both from one model."
        )
    known, k = _unit(known), min(k, len(known))
    votes_of = np.eye(int(known_labels.max()) + 1)[known_labels]
    found = []
    for start in range(0, len(asked), _CHUNK):
        cosine = _unit(asked[start : start + _CHUNK]) @ known.T
        nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
        weights = np.exp(np.take_along_axis(cosine, nearest, axis=1) / temperature)
        found.append((weights[..., None] * votes_of[nearest]).sum(1).argmax(1))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def probe_predictions(
    known: np.ndarray,
    known_labels: np.ndarray,
    asked: np.ndarray,
    *,
    strength: float = 1.0,
    max_iterations: int = 1_000,
) -> np.ndarray:
    """The class by logistic regression on codes brought to mean 0 and variance 1.

    Units:  strength is the inverse of the L2 penalty's weight.
    Shapes: known [n d], known_labels [n], asked [m d] -> [m] int64.
    Raises: ShapeError if the shapes do not fit, SaccadeError for fewer than two classes.
    """
    _check_labels("codes", known, known_labels)
    if len(np.unique(known_labels)) < 2:
        raise SaccadeError("linear probe: found one class, expected at least two in the data.")
    model = require("sklearn.linear_model", extra="bench")
    mean, spread = known.mean(0), known.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    probe = model.LogisticRegression(C=strength, max_iter=max_iterations)
    probe.fit((known - mean) / spread, known_labels)
    return np.asarray(probe.predict((asked - mean) / spread), dtype=np.int64)


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)


def _check_labels(name: str, values: np.ndarray, labels: np.ndarray) -> None:
    if values.ndim != 2 or labels.shape != values.shape[:1] or not len(labels):
        raise ShapeError(
            f"{name} and labels: found shapes {values.shape} and {labels.shape}, expected one row "
            "and one label for each of at least one sample."
        )
