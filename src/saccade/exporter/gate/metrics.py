# SPDX-License-Identifier: Apache-2.0
"""Distances of an artefact from its reference, and the largest that are allowed."""

from collections.abc import Mapping, Sequence

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.interface import Arrays, Component

# The one table: whoever compares answers asks `thresholds_of` or `tensor_limit`. A figure that a
# precision does not list is reported but not held against it. The invariants allow what float32
# does: that no weight above 1e-4 has another support than the reference becomes 3e-3 where the
# scores behind it are rounded to half precision.
THRESHOLDS: dict[str, dict[str, float]] = {
    "fp32": {
        "relative_error": 1e-3,
        "one_minus_cosine": 1e-6,
        "score_points": 0.2,
        "row_isolation": 1e-4,
        "top1_flips": 0,
        "op_laws": 1,
        "sensitive_rows": 0.1,
    },
    "fp16": {
        "relative_error": 3e-2,
        "one_minus_cosine": 1e-4,
        "score_points": 0.5,
        "row_isolation": 3e-2,
        "top1_flips": 0,
        "op_laws": 30,
        "sensitive_rows": 0.1,
    },
    "bf16": {
        "relative_error": 1e-1,
        "one_minus_cosine": 1e-3,
        "score_points": 0.5,
        "row_isolation": 1e-1,
        "top1_flips": 0,
        "op_laws": 300,
        "sensitive_rows": 0.1,
    },
    "int8": {
        "one_minus_cosine": 1e-2,
        "score_points": 1.0,
        "row_isolation": 1e-1,
        "top1_flips": 0,
        "op_laws": 300,
    },
}
# A relative error's denominator is at least this share of the largest magnitude. Half precision
# rounds a sum's largest terms by up to 1/256 of them: below a tenth there is nothing to compare.
FLOORS = {"fp32": 1e-2, "fp16": 1e-1, "bf16": 1e-1, "int8": 1e-1}
# With this floor a number near zero counts no more than the largest: of a tensor in the midst of a
# graph, whose small numbers nobody reads, and of an answer that only has to be the same model's.
WHOLE = 1.0
# A vector shorter than this share of the longest has no direction worth the name.
_SHORTEST = 1e-2
# Without custom ops there is no invariant to keep, and few models have rows that float32 cannot
# hold.
_NOT_ALWAYS = ("op_laws", "sensitive_rows")
_COSINE_OF = ("logits", "embedding", "slots")


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


def tensor_limit(precision: str) -> float:
    """Limit for a whole tensor, by `relative_error` with the floor `WHOLE`.

    The gate holds no output of int8 to a relative error, but it does hold its rows together.
    """
    row = THRESHOLDS[precision]
    return row.get("relative_error", row["row_isolation"])


def exceeded(figures: Mapping[str, float], thresholds: Mapping[str, float]) -> list[str]:
    """The figures above their threshold; one that is not a number is above any."""
    return [
        name
        for name, limit in thresholds.items()
        if (name in figures or name not in _NOT_ALWAYS) and not figures[name] <= limit
    ]


def figures_of(
    reference: Arrays,
    runs: Sequence[Sequence[Arrays]],
    inputs: Arrays,
    labelled: Arrays,
    component: Component,
    floor: float,
    ill_conditioned: Arrays | None = None,
) -> dict[str, float]:
    """The gate's figures: the worst over all outputs and all ways to batch the same samples.

    `runs` has a list a runner, whose first run the others of that list must agree with, row by row.
    `labelled` are the checkpoint's calibration arrays of the first samples, with which a score is
    computed. An invariant of the component's ops is a figure of its own, as a share of what it
    allows. The `ill_conditioned` rows of each output are left out of errors, cosines and isolation;
    their share is a figure.

    Units:  score_points in percentage points, top1_flips in rows, the others fractions.
    """
    every = [run for group in runs for run in group]
    figures = {
        "relative_error": _worst(row_errors(every, reference, floor), ill_conditioned),
        "one_minus_cosine": _worst(row_cosines(every, reference), ill_conditioned),
        "score_points": max(score_points(run, reference, labelled, component) for run in every),
        "row_isolation": _worst(rows_apart(runs, floor), ill_conditioned),
        "top1_flips": max(top1_flips(run, reference) for run in every),
    }
    invariants = [
        invariant(inputs, run, reference)
        for invariant in component.invariants.values()
        for run in every
    ]
    if invariants:
        figures["op_laws"] = float(max(invariants)) if np.isfinite(invariants).all() else np.inf
    if ill_conditioned is not None:
        figures["sensitive_rows"] = float(np.any([*ill_conditioned.values()], axis=0).mean())
    return figures


def _vectors(reference: Arrays) -> list[str]:
    """Outputs whose direction counts; where none of the usual is there, all that have rows."""
    usual = [name for name in _COSINE_OF if name in reference]
    return usual or [name for name, array in reference.items() if array.ndim > 1]


def relative_errors(actual: np.ndarray, expected: np.ndarray, floor: float) -> np.ndarray:
    """|a - b| / (|b| + floor max|b|) of each number: the one measure of an error.

    The same infinity on both sides is no error, nor is NaN; on one side either is an infinite one.

    Shapes: both alike, answered as they are.
    """
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(b)
    scale = np.abs(b) + floor * np.abs(b).max(initial=0.0, where=finite)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(a - b) / np.maximum(scale, np.finfo(np.float64).tiny)
    return np.where(same, 0.0, np.where(finite & np.isfinite(a), errors, np.inf))


def relative_error(actual: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """The largest of `relative_errors`; infinite where the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float(relative_errors(actual, expected, floor).max(initial=0.0))


def row_errors(runs: Sequence[Arrays], expected: Arrays, floor: float) -> dict[str, np.ndarray]:
    """Largest of `relative_errors` of each row of each output, over all runs.

    Shapes: each output [n ...], answered as [n]; infinite where a run has another shape or what is
            not a number.
    """
    return {
        name: np.max([_row_errors(run[name], array, floor) for run in runs], axis=0)
        for name, array in expected.items()
    }


def rows_apart(runs: Sequence[Sequence[Arrays]], floor: float) -> dict[str, np.ndarray]:
    """By how much each row of each output moves between the runs of one runner.

    Shapes: as `row_errors`.
    """
    moved = [row_errors(group, group[0], floor) for group in runs]
    return {name: np.max([run[name] for run in moved], axis=0) for name in moved[0]}


def _row_errors(actual: np.ndarray, expected: np.ndarray, floor: float) -> np.ndarray:
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.full(len(expected), np.inf)
    return relative_errors(actual, expected, floor).reshape(len(expected), -1).max(axis=1)


def _worst(errors: Arrays, left_out: Arrays | None) -> float:
    kept = {} if left_out is None else {name: ~rows for name, rows in left_out.items()}
    return float(
        max(error.max(initial=0, where=kept.get(name, True)) for name, error in errors.items())
    )


def row_cosines(runs: Sequence[Arrays], expected: Arrays) -> dict[str, np.ndarray]:
    """Largest `one_minus_cosine` of each row of each output whose direction counts.

    Shapes: as `row_errors`.
    """
    return {
        name: np.max([one_minus_cosine(run[name], expected[name]) for run in runs], axis=0)
        for name in _vectors(expected)
    }


def one_minus_cosine(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """1 - cos of each row, as half the squared distance of the unit vectors.

    A vector of less than a hundredth of the longest, such as a black pixel, is measured as if it
    had that length. Of several vectors the worst counts.

    Shapes: both [n d], or [n ... d] -> [n].
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.full(len(expected), np.inf)
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    least = max(_SHORTEST * np.linalg.norm(b, axis=-1).max(), np.finfo(np.float64).tiny)
    apart = np.square(_unit(a, least) - _unit(b, least)).sum(axis=-1) / 2
    return apart.reshape(len(apart), -1).max(axis=1)


def score_points(
    answers: Arrays, expected: Arrays, labelled: Arrays, component: Component
) -> float:
    """By how much the score on the labelled samples moves; 0 where nothing can be scored.

    Units: percentage points.
    """
    score = component.score or _top1
    if component.score is None and not ("logits" in expected and "labels" in labelled):
        return 0.0
    count = len(next(iter(labelled.values())))
    first = [
        {name: array[:count] for name, array in arrays.items()} for arrays in (answers, expected)
    ]
    found_score, expected_score = (score(answers, labelled) for answers in first)
    # A component says NaN where the calibration data has no right answers.
    if np.isnan(expected_score):
        return 0.0
    return float(abs(found_score - expected_score) * 100)


def _top1(answers: Arrays, labelled: Arrays) -> float:
    scores = answers.get("probabilities", answers["logits"])
    return float((scores.argmax(axis=-1) == labelled["labels"]).mean())


def top1_flips(answers: Arrays, expected: Arrays) -> int:
    """Rows whose first class differs though the reference's margin is beyond twice the error.

    The class is read from the probabilities, which is what a caller reads; margin and largest
    error are those of the logits. Without logits there is nothing to flip.
    """
    if "logits" not in expected or expected["logits"].shape[-1] < 2:
        return 0
    a, b = answers["logits"].astype(np.float64), expected["logits"].astype(np.float64)
    rows = np.arange(len(b))
    first = b.argmax(axis=-1)
    runner_up = np.where(np.arange(b.shape[-1]) == first[:, None], -np.inf, b).max(axis=-1)
    clear = b[rows, first] - runner_up > 2 * np.abs(a - b).max()
    scores = answers.get("probabilities", answers["logits"])
    return int(np.sum(clear & (scores[rows, first] < scores.max(axis=-1))))


def _unit(rows: np.ndarray, least: float) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), least)
