# SPDX-License-Identifier: Apache-2.0
"""A variant as a function whose answer is the largest of its logits, and the samples to answer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.runtimes.runners import run_in_batches
from saccade.models.interface import Arrays

_BATCH = 32


@dataclass(frozen=True)
class Decisions:
    """What a variant would answer on each sample.

    Shapes: logits [n classes]; labels [n], or None where the data has none.
    """

    logits: np.ndarray
    labels: np.ndarray | None
    data: str
    data_sha256: str


@dataclass(frozen=True)
class Decider:
    """A variant as a function from inputs to logits, and the samples of one split.

    Shapes: inputs [n ...] by name, labels [n] or None; `run` maps any rows of the inputs to
        logits [rows classes]; `independent` are the rows that are independent draws, None: all.
    """

    run: Callable[[Arrays], np.ndarray]
    inputs: Arrays
    labels: np.ndarray | None
    data: str
    data_sha256: str
    independent: np.ndarray | None = None

    def logits(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the logits of some samples, or of all.

        Shapes: rows [r] -> [r classes].
        """
        inputs = {name: array[rows] for name, array in self.inputs.items()}
        return run_in_batches(lambda some: {"logits": self.run(some)}, inputs, _BATCH)["logits"]

    def decisions(self) -> Decisions:
        """Return the logits of the samples that are independent draws."""
        rows = slice(None) if self.independent is None else self.independent
        labels = None if self.labels is None else self.labels[rows]
        return Decisions(self.logits(rows), labels, self.data, self.data_sha256)


Decide = Callable[[EvaluatedModel, EvaluateOptions, str], Decider]
