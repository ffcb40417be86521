# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: scores with their intervals, and the value of each sample."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from saccade.models.scores.intervals import bootstrap, wilson
from saccade.plugins.execution import Ops


@dataclass(frozen=True)
class Score:
    """One score of an evaluation.

    Units: a share in [0, 1] if the unit is `share`.
    """

    name: str
    value: float
    interval: tuple[float, float] | None  # 95 %; None if the score has no samples
    n: int
    unit: str = "share"
    higher_is_better: bool = True


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of one variant on one task, the main score first.

    Shapes: samples [n], the values whose mean is the first score.
    """

    variant: str
    task: str
    data: str
    data_sha256: str
    scores: tuple[Score, ...]
    samples: np.ndarray = field(repr=False, compare=False)
    protocol: str = ""  # how the answers were obtained, if a task leaves a choice
    split: str = ""  # of the data; empty: the task has one only
    skipped: int = 0  # unreadable rows of it that were left out
    ops: Ops = None  # how custom ops ran; None: there are none, or torch ran them

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, without the samples."""
        values = asdict(self)
        del values["samples"]
        return values


def proportion(name: str, right: np.ndarray) -> Score:
    """Return the share of right answers with Wilson's interval.

    Shapes: right [n] of 0 and 1.
    """
    n = len(right)
    return Score(name, float(np.mean(right)), wilson(int(np.sum(right)), n), n)


def mean(
    name: str, values: np.ndarray | Sequence[float], *, unit: str = "share", higher: bool = True
) -> Score:
    """Return a mean with its bootstrap interval.

    Shapes: values [n].
    """
    array = np.asarray(values, dtype=np.float64)
    return Score(name, float(array.mean()), bootstrap(array), len(array), unit, higher)
