# SPDX-License-Identifier: Apache-2.0
"""Rows on which no file of a precision can be close to float64, because the model itself is not.

A root of a singular value near zero, or a slot between two objects, turns a rounding into a visible
change. On such a row, the gate only requires that a file is as good as the model it was made from.
The model's own error in float32 is measured. For a narrower type it is scaled by how much larger
that type's roundings are.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from saccade.exporter.gate.metrics import THRESHOLDS, row_cosines, row_errors, rows_apart
from saccade.models.interface import Arrays

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
