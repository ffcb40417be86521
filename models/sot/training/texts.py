# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for a classifier, as the states that a language model gave their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.data.datasets import calibration_rows
from saccade.models.data.token_states import TokenStates, token_states
from saccade.models.sot.training.images import Labelled
from saccade.models.training.options import TrainOptions


@dataclass(frozen=True)
class TextSource:
    """The texts of both splits, as an `ImageSource` holds images."""

    train: TokenStates
    held_out: TokenStates
    samples: int  # for calibration

    @property
    def name(self) -> str:
        """Of the data, for the card."""
        return self.train.name

    @property
    def sha256(self) -> Mapping[str, str]:
        """By split."""
        return {"train": self.train.sha256, "validation": self.held_out.sha256}

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the labels."""
        return self.train.class_names

    @property
    def validation(self) -> Labelled:
        """Inputs by name, and labels [n]."""
        return self.held_out.inputs, self.held_out.labels

    @property
    def calibration(self) -> Labelled:
        """Training texts, the same on every call."""
        rows = calibration_rows(len(self.train.labels), self.samples)
        return _rows(self.train, rows)

    def draw(self, rng: np.random.Generator, count: int) -> Labelled:
        """Texts of the training part at random."""
        return _rows(self.train, rng.integers(len(self.train.labels), size=count))

    def fields(self) -> dict[str, Any]:
        """What the data decides about the configuration; a text's states have no trunk here."""
        _, most, width = self.train.tokens.shape
        return {
            "input": "tokens",
            "max_tokens": most,
            "dim": width,
            "classes": len(self.class_names),
            "heads": 1,
        }


def _rows(data: TokenStates, rows: np.ndarray) -> Labelled:
    return {name: each[rows] for name, each in data.inputs.items()}, data.labels[rows]


def text_source(options: TrainOptions, *, calibration: int) -> TextSource:
    """The token states in the .npz that the options name.

    Raises: SaccadeError if there is none, it cannot be used, or `--set` contradicts it.
    """
    if options.data is None:
        raise SaccadeError(
            "--set input=tokens: texts come as the states of a language model, and none are "
            "generated here. Pass --data with an .npz of tokens, lengths and labels."
        )
    source = TextSource(
        token_states(options.data, "train"), token_states(options.data, "validation"), calibration
    )
    fields = source.fields()
    for name in ("max_tokens", "dim", "classes"):
        if options.set.get(name, fields[name]) != fields[name]:
            raise SaccadeError(
                f"--set {name}={options.set[name]}: the data says {fields[name]}. Leave it out."
            )
    return source
