# SPDX-License-Identifier: Apache-2.0
"""Training of a NAC on the user's points, texts, tokens, pairs and conditions."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import image_fields
from saccade.models.data.sequences import SampleInputs, Sequences, has_conditions, sequences
from saccade.models.data.splits import calibration_rows
from saccade.models.nac.components import model_arguments
from saccade.models.nac.training.circuit_task import CircuitTask
from saccade.models.nac.training.recipes import LOCAL, SEQUENCES, patch_side
from saccade.models.training.options import TrainOptions, chosen_recipe
from saccade.models.training.task import Task

QUICK = SEQUENCES
SHIPPED = replace(QUICK, steps=6_000)


def takes_sequences(options: TrainOptions) -> bool:
    """Return whether the configuration asks for more than one image per sample."""
    return not _takes(options).is_image


def _takes(options: TrainOptions) -> SampleInputs:
    kind = options.value("input", "image")
    vocabulary = options.value("vocabulary", ()) if kind == "characters" else ()
    # Without conditions in the data, the input tokens are the condition.
    given = options.value("condition_dim", 0) or has_conditions(options.data)
    return SampleInputs(
        kind,
        options.value("input_sets", 1),
        options.value("max_tokens", 0),
        options.value("token_dim", 0),
        tuple(vocabulary),
        conditioned=bool(options.value("conditional", False) and given),
        condition_most=options.value("condition_tokens", 0),
    )


def task(options: TrainOptions) -> Task:
    """Train a NAC on the user's samples of the kind that `--set input` names.

    Raises: SaccadeError if there is no data of that kind, or a value is out of range.
    """
    takes = _takes(options)
    if options.data is None:
        raise SaccadeError(
            f"--set input={takes.kind}: there is no generated data of this kind. Pass --data with "
            "your own (see docs/data.md), or --data listops for characters or bytes."
        )
    training = sequences(options.data, "train", takes, options.asked)
    validation = sequences(options.data, "validation", training.takes, options.asked)
    if len(training.class_names) < 2:
        raise SaccadeError(
            f"{options.data}: found the class {training.class_names[0]}, expected at least two. "
            "Add samples of others."
        )
    return SequenceTask(options, training, validation)


class SequenceTask(CircuitTask):
    """A `CircuitTask` on samples in memory; a batch is as long as its longest sample."""

    at_once = 50
    regularized_by = ("label_smoothing",)

    def __init__(self, options: TrainOptions, training: Sequences, validation: Sequences) -> None:
        recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        fields = _fields(training)
        super().__init__(options, recipe, fields, ())
        self.training, self.data, self.labels = training, training.name, training.class_names
        self.data_sha256 = {"train": training.sha256, "validation": validation.sha256}
        self.scored = _arguments(self.model.config, validation.inputs), validation.labels
        kept = calibration_rows(len(training.labels))
        self._kept = {name: array[kept] for name, array in training.inputs.items()}
        self._kept_labels = training.labels[kept]
        self.ranked = _arguments(self.model.config, self._kept)
        self.card = {
            "validation_samples": len(validation.labels),
            "majority": float(np.bincount(validation.labels).max() / len(validation.labels)),
        }

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return the inputs by name, cut to the longest, labels [b], and `modules` [m] or none."""
        rows = rng.integers(len(self.training.labels), size=self.recipe.batch)
        inputs = {name: array[rows] for name, array in self.training.inputs.items()}
        lengths = [inputs[name].max() for name in inputs if name.startswith("length")]
        longest = max(lengths, default=0)
        batch = {
            name: torch.from_numpy(
                array[:, :longest]
                if name.startswith(self.training.takes.kind) and longest
                else array
            )
            for name, array in inputs.items()
        }
        batch["labels"] = torch.from_numpy(self.training.labels[rows])
        return batch | self.modules(step, rng)

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the loss of the class and the graph prior."""
        given = model_arguments(self.model.config, batch)
        logits = self.model(*given, modules=batch.get("modules")).float()
        smoothing = self.recipe.label_smoothing
        return self.with_graph_prior(
            F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
        )

    def calibration(self) -> dict[str, np.ndarray]:
        """Return 256 training samples with their labels."""
        return self._kept | {"labels": self._kept_labels}


def _fields(data: Sequences) -> dict[str, Any]:
    """Return the fields of the configuration that the data decides."""
    takes = data.takes
    fields: dict[str, Any] = {
        "input": takes.kind,
        "input_sets": takes.sets,
        "classes": len(data.class_names),
    }
    if takes.kind == "image":
        images = data.inputs["image"]
        fields |= image_fields(images) | {"patch_px": patch_side(*images.shape[1:3])}
    else:
        fields["max_tokens"] = takes.most
    if takes.kind in ("bytes", "characters"):
        fields |= LOCAL
    if takes.kind == "characters":
        fields["vocabulary"] = takes.vocabulary
    if takes.kind == "tokens":
        fields["token_dim"] = takes.width
    if takes.conditioned:
        _, most, width = data.inputs["condition"].shape
        fields |= {"conditional": True, "condition_dim": width, "condition_tokens": most}
    return fields


def _arguments(config: Any, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray | None, ...]:
    """Return the model's arguments, as arrays."""
    given = model_arguments(config, {name: torch.from_numpy(x) for name, x in inputs.items()})
    return tuple(None if tensor is None else tensor.numpy() for tensor in given)
