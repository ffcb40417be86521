# SPDX-License-Identifier: Apache-2.0
"""Accuracy of classification: from logits, from nearest neighbors, from a linear probe."""

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, require

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
    label_scores = np.take_along_axis(scores, labels[:, None], axis=1)
    # Written so that NaN is never right.
    return (~(scores < label_scores)).sum(1) <= top


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
# Weight decay of AdamW: 12 per decade, as in the code that SPARO's paper used.
_DECAYS = np.logspace(-6, 2, 97)
_FIRST_STEP = 16


class _Fit(Protocol):
    """A fitted classifier."""

    def predict(self, codes: np.ndarray) -> np.ndarray:
        """Return the classes of these codes."""
        ...


def probe_predict(
    train: np.ndarray,
    train_labels: np.ndarray,
    validation: np.ndarray,
    validation_labels: np.ndarray,
    test: np.ndarray,
    *,
    method: Literal["logistic", "adamw"] = "logistic",
    seed: int = 0,
) -> tuple[np.ndarray, float]:
    """Predict classes by a linear classifier on codes of length 1; return them and its penalty.

    `logistic` is regression with an L2 penalty until it converges; `adamw` is AdamW for 10 epochs
    with weight decay. The penalty (or decay) is the one with the highest accuracy on the validation
    codes, the largest of several: seven from 1e-6 to 1e6 (decay: to 1e2), then halved distances
    around the best, down to 8 (12) per decade. In the end, the validation codes are learned from,
    too.

    Shapes: train [n d], train_labels [n], validation [v d], validation_labels [v], test [m d] ->
            [m] int64.
    Units:  the penalty is lambda / 2 |w|^2, added to the sum of the losses.
    Raises: ShapeError if the shapes do not fit, SaccadeError for fewer than two classes.
    Source: Radford et al. 2021 (CLIP), appendix A.3, for the sweep; Vani et al. 2024 (SPARO),
            appendix C.1, for AdamW.
    """
    _check_codes((train, train_labels), (validation, validation_labels))
    train, validation, test = _unit(train), _unit(validation), _unit(test)
    both = np.concatenate([train, validation]), np.concatenate([train_labels, validation_labels])
    penalties = _DECAYS if method == "adamw" else _PENALTIES

    def fitted(codes: np.ndarray, labels: np.ndarray, place: int) -> _Fit:
        penalty = float(penalties[place])
        if method == "adamw":
            return _descended(_AdamW(penalty), codes, labels, int(both[1].max()) + 1, seed)
        return _fitted(codes, labels, penalty)

    accuracies: dict[int, float] = {}

    def accuracy(place: int) -> float:
        if place not in accuracies:
            right = fitted(train, train_labels, place).predict(validation) == validation_labels
            accuracies[place] = float(np.mean(right))
        return accuracies[place]

    def best_of(places: range | tuple[int, ...]) -> int:
        return max(places, key=lambda place: (accuracy(place), place))

    last = len(penalties) - 1
    best, step = best_of(range(0, last + 1, _FIRST_STEP)), _FIRST_STEP // 2
    while step:
        best = best_of((max(0, best - step), best, min(last, best + step)))
        step //= 2
    labels = fitted(*both, best).predict(test)
    return np.asarray(labels, dtype=np.int64), float(penalties[best])


def dino_probe_predict(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, *, seed: int = 0
) -> np.ndarray:
    """Predict classes by a linear classifier that SGD trains for 100 epochs.

    The features are used as they are. No validation samples choose anything.

    Shapes: train [n d], train_labels [n], test [m d] -> [m] int64.
    Raises: ShapeError if the shapes do not fit, SaccadeError for fewer than two classes.
    Source: the defaults of DINO's code (Caron et al. 2021) for linear classification, which Vani
            et al. 2024 (SPARO), appendix C.2, use; without its random crops and flips.
    """
    _check_codes((train, train_labels))
    fit = _descended(_SGD(), train, train_labels, int(train_labels.max()) + 1, seed)
    return fit.predict(test)


@dataclass(frozen=True)
class _AdamW:
    decay: float
    epochs: int = 10
    batch: int = 64
    rate: float = 0.1
    by_step: bool = True  # how often the cosine lowers the rate, else by epoch
    std: float | None = None  # of the first weights; None: as torch draws them

    def optimizer(self, torch: Any, layer: Any) -> Any:
        return torch.optim.AdamW(layer.parameters(), lr=self.rate, weight_decay=self.decay)


@dataclass(frozen=True)
class _SGD:
    epochs: int = 100
    batch: int = 128
    rate: float = 0.001 * 128 / 256  # in proportion to the batch
    by_step: bool = False
    std: float | None = 0.01

    def optimizer(self, torch: Any, layer: Any) -> Any:
        return torch.optim.SGD(layer.parameters(), lr=self.rate, momentum=0.9)


def _descended(
    recipe: _AdamW | _SGD, codes: np.ndarray, labels: np.ndarray, classes: int, seed: int
) -> _Fit:
    """Train a linear layer with the cross entropy; the rate falls along half a cosine."""
    torch = require("torch", extra="export")
    inputs = torch.from_numpy(np.asarray(codes, dtype=np.float32))
    targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        layer = torch.nn.Linear(inputs.shape[1], classes)
        if recipe.std is not None:
            torch.nn.init.normal_(layer.weight, std=recipe.std)
            torch.nn.init.zeros_(layer.bias)
        optimizer = recipe.optimizer(torch, layer)
        for epoch in range(recipe.epochs):
            batches = torch.randperm(len(inputs)).split(recipe.batch)
            for place, rows in enumerate(batches):
                passed = epoch + (place / len(batches) if recipe.by_step else 0)
                factor = 0.5 * (1 + math.cos(math.pi * passed / recipe.epochs))
                optimizer.param_groups[0]["lr"] = recipe.rate * factor
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(layer(inputs[rows]), targets[rows]).backward()
                optimizer.step()
    return _Layer(*(tensor.detach().numpy() for tensor in (layer.weight, layer.bias)))


@dataclass(frozen=True)
class _Layer:
    weight: np.ndarray
    bias: np.ndarray

    def predict(self, codes: np.ndarray) -> np.ndarray:
        return (codes.astype(np.float32) @ self.weight.T + self.bias).argmax(1)


def _fitted(codes: np.ndarray, labels: np.ndarray, penalty: float) -> _Fit:
    linear = require("sklearn.linear_model", extra="bench")
    with warnings.catch_warnings():
        # Weak penalties stop at the limit of iterations, as in CLIP's protocol.
        warnings.simplefilter("ignore")
        fit: _Fit = linear.LogisticRegression(C=1 / penalty, max_iter=_ITERATIONS).fit(
            codes, labels
        )
    return fit


def _check_codes(*parts: tuple[np.ndarray, np.ndarray]) -> None:
    for codes, labels in parts:
        _check_labels("codes", codes, labels)
    if len(np.unique(parts[0][1])) < 2:
        raise SaccadeError("linear probe: found one class in the data, expected at least two.")


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)


def _check_labels(name: str, values: np.ndarray, labels: np.ndarray) -> None:
    if values.ndim != 2 or labels.shape != values.shape[:1] or not len(labels):
        raise ShapeError(
            f"{name} and labels: found shapes {values.shape} and {labels.shape}, expected one row "
            "and one label per sample, and at least one sample."
        )
