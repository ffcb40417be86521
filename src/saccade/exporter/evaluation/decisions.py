# SPDX-License-Identifier: Apache-2.0
"""The logits from which a variant decides, on the samples of one split."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions


@dataclass(frozen=True)
class Decisions:
    """What a variant would answer on each sample.

    Shapes: logits [n classes]; labels [n], or None where the data has none.
    """

    logits: np.ndarray
    labels: np.ndarray | None
    data: str
    data_sha256: str


Decide = Callable[[EvaluatedModel, EvaluateOptions, str], Decisions]
