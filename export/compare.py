# SPDX-License-Identifier: Apache-2.0
"""How far an artefact is from its reference, in figures, and how far it may be."""

from collections.abc import Mapping, Sequence

import numpy as np

from saccade.plugins.errors import SaccadeError

Arrays = Mapping[str, np.ndarray]

# The one table. A figure that a precision does not list is reported but not held against it.
THRESHOLDS: dict[str, dict[str, float]] = {
    "fp32": {
        "relative_error": 1e-3,
        "one_minus_cosine": 1e-6,
        "score_points": 0.2,
        "row_isolation": 1e-4,
        "top1_flips": 0,
    },
    "fp16": {
        "relative_error": 3e-2,
        "one_minus_cosine": 1e-4,
        "score_points": 0.5,
        "row_isolation": 3e-2,
        "top1_flips": 0,
    },
    "bf16": {
        "relative_error": 1e-1,
        "one_minus_cosine": 1e-3,
        "score_points": 0.5,
        "row_isolation": 1e-1,
        "top1_flips": 0,
    },
    "int8": {
        "one_minus_cosine": 1e-2,
        "score_points": 1.0,
        "row_isolation": 1e-1,
        "top1_flips": 0,
    },
}
_COSINE_OF = ("logits", "embedding")


def thresholds_of(precision: str, overrides: Mapping[str, float]) -> dict[str, float]:
    """The table's row, with the overrides in place.

    Raises: SaccadeError if an override names no figure of the row or is not a number >= 0.
    """
    row = THRESHOLDS[precision]
    for name, value in overrides.items():
        if name not in row:
            raise SaccadeError(
                f"threshold {name!r} is not in the table for {precision}. It has: {', '.join(row)}."
            )
        if not value >= 0 or not np.isfinite(value):
            raise SaccadeError(f"threshold {name} is {value}, expected a number of at least 0.")
    return {**row, **overrides}


def exceeded(figures: Mapping[str, float], thresholds: Mapping[str, float]) -> list[str]:
    """The figures above their threshold; one that is not a number is above any."""
    return [name for name, limit in thresholds.items() if not figures[name] <= limit]


def figures_of(reference: Arrays, runs: Sequence[Arrays], labels: np.ndarray) -> dict[str, float]:
    """The gate's figures: the worst over all outputs and all ways to batch the same samples.

    The first run is the one that the others must agree with, row by row. The first samples are
    the labelled ones.

    Shapes: logits [n k], probabilities [n k], embedding [n d], labels [m] with m <= n.
    Units:  score_points in percentage points, top1_flips in rows, the others fractions.
    """
    return {
        "relative_error": max(
            relative_error(run[name], reference[name]) for run in runs for name in reference
        ),
        "one_minus_cosine": max(
            one_minus_cosine(run[name], reference[name]) for run in runs for name in _COSINE_OF
        ),
        "score_points": max(score_points(run, reference, labels) for run in runs),
        "row_isolation": max(
            relative_error(run[name], runs[0][name]) for run in runs for name in reference
        ),
        "top1_flips": max(top1_flips(run, reference) for run in runs),
    }


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest |a - b| / (|b| + 1e-2 max|b|).

    Shapes: any, both the same; otherwise infinite, as it is for what is not a number.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    a, b = found.astype(np.float64), expected.astype(np.float64)
    scale = np.abs(b) + 1e-2 * np.abs(b).max()
    return float(np.max(np.abs(a - b) / np.maximum(scale, np.finfo(np.float64).tiny)))


def one_minus_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest 1 - cos over the rows, as half the squared distance of the unit vectors.

    Shapes: both [n d].
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return np.inf
    return float(np.max(np.square(_unit(found) - _unit(expected)).sum(axis=-1)) / 2)


def score_points(found: Arrays, expected: Arrays, labels: np.ndarray) -> float:
    """By how much top-1 on the labelled samples moves.

    Units: percentage points.
    """
    hits = [
        (each["probabilities"][: len(labels)].argmax(axis=-1) == labels).mean()
        for each in (found, expected)
    ]
    return float(abs(hits[0] - hits[1]) * 100)


def top1_flips(found: Arrays, expected: Arrays) -> int:
    """Rows whose first class differs though the reference's margin is beyond twice the error.

    The class is read from the probabilities, which is what a caller reads; margin and largest
    error are those of the logits.
    """
    a, b = found["logits"].astype(np.float64), expected["logits"].astype(np.float64)
    rows = np.arange(len(b))
    first = b.argmax(axis=-1)
    runner_up = np.where(np.arange(b.shape[-1]) == first[:, None], -np.inf, b).max(axis=-1)
    clear = b[rows, first] - runner_up > 2 * np.abs(a - b).max()
    probabilities = found["probabilities"]
    return int(np.sum(clear & (probabilities[rows, first] < probabilities.max(axis=-1))))


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(length == 0, 1, length)
