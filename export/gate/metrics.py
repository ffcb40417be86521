# SPDX-License-Identifier: Apache-2.0
"""Metrics for the difference between an artefact and its reference, and their thresholds."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.models.interface import Arrays, Component

# The only table: to compare answers, call `thresholds_of` or `tensor_limit`. A figure that is not
# listed for a precision is reported but has no limit. The limits of op invariants are multiples of
# what float32 may do: in float32 no weight above 1e-4 may have a support that differs from the
# reference's, and with scores rounded to half precision this becomes 3e-3.
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
# rounds the largest terms of a sum by up to 1/256, so numbers below a tenth are mostly rounding.
FLOORS = {"fp32": 1e-2, "fp16": 1e-1, "bf16": 1e-1, "int8": 1e-1}
# With this floor the error of a number near zero counts no more than that of the largest. It is for
# tensors inside a graph, where small numbers do not matter, and for answers that only have to come
# from the same model.
WHOLE = 1.0
# A vector shorter than this share of the longest has no meaningful direction.
_SHORTEST = 1e-2
# Figures that may be absent: without custom ops there are no invariants, and few models have rows
# that are sensitive to rounding.
_NOT_ALWAYS = ("op_laws", "sensitive_rows")
_COSINE_OF = ("logits", "embedding", "slots")


# Limits that every file of finite numbers meets. Only steps of policies have them, whose answers a
# certificate covers; an answer must still not depend on the other samples of its batch.
_OF_STEPS = {
    "relative_error": 1e9,
    "one_minus_cosine": 2,
    "score_points": 100,
    "top1_flips": 1e9,
    "sensitive_rows": 1,
}


def step_thresholds(precision: str) -> dict[str, float]:
    """Return the overrides of a variant that is only a step of policies; none for fp32."""
    row = {} if precision == "fp32" else THRESHOLDS[precision]
    return {name: limit for name, limit in _OF_STEPS.items() if name in row}


def thresholds_of(precision: str, overrides: Mapping[str, float]) -> dict[str, float]:
    """Return the table's row for a precision, with the overrides applied.

    Raises: SaccadeError if an override is not in the row or is not a finite number >= 0.
    """
    row = THRESHOLDS[precision]
    for name, value in overrides.items():
        check_one_of(f"--threshold of {precision}", name, row)
        if not value >= 0 or not np.isfinite(value):
            raise SaccadeError(f"--threshold {name} is {value}, expected a number of at least 0.")
    return {**row, **overrides}


def tensor_limit(precision: str) -> float:
    """Return the limit for a whole tensor, for `relative_error` with the floor `WHOLE`.

    int8 has no limit for relative errors; the limit for row isolation is used instead.
    """
    row = THRESHOLDS[precision]
    return row.get("relative_error", row["row_isolation"])


def exceeded(figures: Mapping[str, float], thresholds: Mapping[str, float]) -> list[str]:
    """Return the figures above their threshold; NaN counts as above."""
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
    """Compute the gate's figures: the worst over all outputs and all ways to batch the samples.

    `runs` has one list per runner; row isolation compares the runs of a list with its first one.
    `labelled` are the checkpoint's calibration arrays of the first samples, used for scores. The
    invariants of the component's ops give one figure, as a share of what they allow. The
    `ill_conditioned` rows of each output are excluded from errors, cosines and isolation; their
    share is a figure itself.

    Units: score_points in percentage points, top1_flips in rows, the others fractions.
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
    """Outputs whose direction matters; if there is none of the usual ones, all that have rows."""
    usual = [name for name in _COSINE_OF if name in reference]
    return usual or [name for name, array in reference.items() if array.ndim > 1]


def relative_errors(actual: np.ndarray, expected: np.ndarray, floor: float) -> np.ndarray:
    """Compute |a - b| / (|b| + floor max|b|) of each number, the error measure used everywhere.

    The same infinity on both sides is not an error, nor is NaN on both sides. An infinity or
    NaN on one side only is an infinite error.

    Shapes: both the same, and so is the result.
    """
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(b)
    scale = np.abs(b) + floor * np.abs(b).max(initial=0.0, where=finite)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(a - b) / np.maximum(scale, np.finfo(np.float64).tiny)
    return np.where(same, 0.0, np.where(finite & np.isfinite(a), errors, np.inf))


def relative_error(actual: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """Return the largest of `relative_errors`; infinite if the shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    return float(relative_errors(actual, expected, floor).max(initial=0.0))


def row_errors(runs: Sequence[Arrays], expected: Arrays, floor: float) -> dict[str, np.ndarray]:
    """Return the largest of `relative_errors` for each row of each output, over all runs.

    The error is infinite if a run has another shape or a value that is not a number.
    Shapes: each output [n ...] -> [n].
    """
    return {
        name: np.max([_row_errors(run[name], array, floor) for run in runs], axis=0)
        for name, array in expected.items()
    }


def rows_apart(runs: Sequence[Sequence[Arrays]], floor: float) -> dict[str, np.ndarray]:
    """Return how much each row of each output changes between the runs of one runner.

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
    """Return the largest `one_minus_cosine` for each row of each output whose direction matters.

    Shapes: as `row_errors`.
    """
    return {
        name: np.max([one_minus_cosine(run[name], expected[name]) for run in runs], axis=0)
        for name in _vectors(expected)
    }


def one_minus_cosine(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Compute 1 - cos of each row, as half the squared distance of the unit vectors.

    A vector shorter than a hundredth of the longest, such as a black pixel, is treated as if it had
    that length. If a row has several vectors, the worst counts.

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
    """Return how much the score on the labeled samples changes; 0 if nothing can be scored.

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
    # A component returns NaN if the calibration data has no labels.
    if np.isnan(expected_score):
        return 0.0
    return float(abs(found_score - expected_score) * 100)


def _top1(answers: Arrays, labelled: Arrays) -> float:
    scores = answers.get("probabilities", answers["logits"])
    return float((scores.argmax(axis=-1) == labelled["labels"]).mean())


def top1_flips(answers: Arrays, expected: Arrays) -> int:
    """Count rows whose top class differs although the margin exceeds twice the largest error.

    The class comes from the probabilities, which callers read. Margin (of the reference) and
    largest error are those of the logits. Without logits the count is 0.
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


# Rows on which no file of a precision can be close to float64, because the model itself is not: a
# root of a singular value near zero, or a slot between two objects, turns a rounding into a visible
# change. There, the gate only requires that a file is as good as the model it was made from, whose
# own error in float32 is measured, and scaled by how much larger a narrower type's roundings are.

# The errors of two summation orders differ by a small factor.
TIMES_FLOAT32 = 4
# How much larger a rounding is than in float32; fp32 itself gets no allowance.
ROUNDINGS = {"fp32": 1, "fp16": 2**13, "bf16": 2**16}
MOST = {"fp32": THRESHOLDS["fp16"]["relative_error"]}


def perturbed(model: Any, seed: int) -> Any:
    """Return a copy of a torch model with every weight moved up or down by one rounding."""
    import torch

    copy = deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * (2 * up - 1))
    return copy


def ill_conditioned_rows(
    runs: Sequence[Sequence[Arrays]],
    reference: Arrays,
    own: Arrays,
    thresholds: Mapping[str, float],
    precision: str,
    floor: float,
) -> dict[str, np.ndarray]:
    """Find rows beyond a threshold whose error the unfolded model's own rounding explains.

    Such an error is at most four times that of the model.

    `own` are the `row_errors` of that model in float32, scaled here to those of `precision`.

    Shapes: runs as for `figures_of`, each output [n ...]; own and the answer [n], the answer bool.
    """
    every = [run for group in runs for run in group]
    errors = row_errors(every, reference, floor)
    apart = rows_apart(runs, floor)
    cosines = row_cosines(every, reference)
    rows = {}
    for name in reference:
        beyond = errors[name] > thresholds["relative_error"]
        beyond |= apart[name] > thresholds["row_isolation"]
        beyond |= cosines.get(name, np.zeros(1)) > thresholds["one_minus_cosine"]
        expected = TIMES_FLOAT32 * ROUNDINGS[precision] * own[name]
        excused = np.minimum(expected, MOST.get(precision, np.inf))
        rows[name] = beyond & (np.maximum(errors[name], apart[name]) <= excused)
    return rows
