# SPDX-License-Identifier: Apache-2.0
"""Task that a family gives to the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """Everything about a run but its data and seed.

    Units: learning_rate at its highest; steps of the optimiser; shares of all steps.
    """

    steps: int
    batch: int
    learning_rate: float
    config: Mapping[str, Any] = field(default_factory=dict)  # fields that data does not decide
    weight_decay: float = 0.05  # of matrices; see `without_decay`
    without_decay: tuple[str, ...] = ("bias", "norm", "position", "embedding")  # parts of names
    betas: tuple[float, float] = (0.9, 0.98)
    warm_up_steps: int = 100
    schedule: str = "cosine"  # or trapezoid: level, then down over `decay_share`
    decay_share: float = 0.25
    clip_norm: float = 1.0
    precision: str = ""  # of products: bf16 or fp32; none: bf16 on a GPU that has it
    ema: float = 0.0  # decay of the averaged weights that are validated and saved; 0: none
    validate_every: int = 0  # steps; 0: ten times in a run
    extra: Mapping[str, Any] = field(default_factory=dict)  # what only this family's task reads


class Task(ABC):
    """A model being trained: its batches, its loss, its score, its checkpoint.

    The loop calls `batch`, then `loss`, with steps from 0; randomness comes from the generator
    that `batch` is given and from torch's own, so that a resumed run goes on as the uninterrupted
    one would have. `task(options)` runs with torch's generator seeded.
    """

    family: str  # as a checkpoint names it
    model: Any  # what is trained; it has `config`
    recipe: Recipe  # with the options' changes in it
    data: str  # the name of the data, for the card
    data_sha256: Mapping[str, str]  # by split
    labels: tuple[str, ...] = ()  # of the classes or answers
    card: Mapping[str, Any] = {}
    auxiliary: Any = None  # a module trained beside the model, left out of the checkpoint

    @abstractmethod
    def batch(self, step: int, rng: np.random.Generator) -> Any:
        """One training batch (a tensor, or tuples, lists and dicts of them), on the CPU.

        The loop brings it to the model's device.
        """

    @abstractmethod
    def loss(self, batch: Any, step: int) -> "Tensor":
        """The scalar to lower; the model is in training mode."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Scores on validation data, the one that chooses the best step first; higher is better.

        The model is in evaluation mode, without gradients, its weights those to be saved.
        """

    @abstractmethod
    def calibration(self) -> dict[str, np.ndarray]:
        """Samples of what the model was trained on, as `checkpoint.Checkpoint` has them."""

    def finish(self) -> None:  # noqa: B027  most families need nothing
        """Whatever the chosen weights still need, such as an order of modules."""

    def report(self) -> dict[str, float]:
        """The scores for the card."""
        return self.validate()

    def state(self) -> dict[str, Any]:
        """State from step to step: dicts and lists of tensors, numbers and texts."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """The inverse of `state`."""

    def saved(self) -> dict[str, Any]:
        """Keyword arguments of `checkpoint.save` but path, family, weights and card."""
        config, calibration = self.model.config, self.calibration()
        return {
            "config": config.to_dict(),
            "preprocessing": Preprocessing.of(config) if "image" in calibration else None,
            "labels": self.labels,
            "calibration": calibration,
        }
