# SPDX-License-Identifier: Apache-2.0
"""Rows on which no float32 file can be near float64, since the model itself is not.

A root of a singular value near zero, or a slot that is between two objects, turns a rounding into
a visible change. On such a row the gate asks that a file is as good as the model it was made of.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from saccade.export.compare import THRESHOLDS, row_errors, rows_apart
from saccade.models.interface import Arrays

# Two orders of the same sums differ by a small factor; beyond half precision there is no excuse.
TIMES_FLOAT32 = 4
MOST = THRESHOLDS["fp16"]["relative_error"]


def sensitive_rows(
    runs: Sequence[Sequence[Arrays]],
    reference: Arrays,
    float32: Arrays,
    thresholds: Mapping[str, float],
) -> dict[str, np.ndarray]:
    """Rows beyond a threshold by at most four times what the unfolded float32 model is off there.

    Shapes: runs as for `figures_of`, each output [n ...], answered as [n] bool.
    """
    errors = row_errors([run for each in runs for run in each], reference)
    own, apart = row_errors([float32], reference), rows_apart(runs)
    rows = {}
    for name in reference:
        beyond = errors[name] > thresholds["relative_error"]
        beyond |= apart[name] > thresholds["row_isolation"]
        excused = np.minimum(TIMES_FLOAT32 * own[name], MOST)
        rows[name] = beyond & (np.maximum(errors[name], apart[name]) <= excused)
    return rows
