# SPDX-License-Identifier: Apache-2.0
"""What a variant answers on the samples of one split: logits, or segmentations."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions


@dataclass(frozen=True)
class Decisions:
    """What a variant would answer on each sample.

    `labelling` are zero-shot labels and their templates, None if the model has its own classes.
    Shapes: logits [n classes]; labels [n], or None where the data has none.
    """

    logits: np.ndarray
    labels: np.ndarray | None
    data: str
    data_sha256: str
    labelling: tuple[tuple[str, ...], tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Segments:
    """The segmentations of a variant, and its confidence in them by each measure.

    Shapes: owners [n h w], the slot of each position; confidence [measures n].
    """

    owners: np.ndarray
    confidence: np.ndarray
    data: str
    data_sha256: str

    @staticmethod
    def joined(parts: "Sequence[Segments]", limit: int | None) -> "Segments":
        """Return the first segmentations of several splits, at most `limit`."""
        hashes = "".join(part.data_sha256 for part in parts)
        sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        return Segments(
            np.concatenate([part.owners for part in parts])[:limit],
            np.concatenate([part.confidence for part in parts], axis=1)[:, :limit],
            parts[0].data,
            parts[0].data_sha256 if len(parts) == 1 else sha256,
        )


Decide = Callable[[EvaluatedModel, EvaluateOptions, str], Decisions]
Segment = Callable[[EvaluatedModel, EvaluateOptions, str], Segments]
