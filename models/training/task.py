# SPDX-License-Identifier: Apache-2.0
"""What a family brings to the training loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn


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


class Task(Protocol):
    """A model being trained: its batches, its loss, its score, its checkpoint.

    The loop calls `batch`, then `loss`, with steps from 0; randomness comes from the generator
    that `batch` is given and from torch's own, so that a resumed run goes on as the uninterrupted
    one would have. `task(options)` runs with torch's generator seeded.

    A task may have more, and the loop uses it: `auxiliary`, a module that is trained beside the
    model and left out of the checkpoint; `state()` and `restore(state)`, what else it remembers
    from step to step (dicts and lists of tensors, numbers and texts); `report()`, the scores for
    the card where they are more than `validate` gives; `card`, a mapping that the card takes over.
    """

    @property
    def family(self) -> str:
        """As a checkpoint names it."""
        ...

    @property
    def model(self) -> "nn.Module":
        """What is trained; it has `config`."""
        ...

    @property
    def recipe(self) -> Recipe:
        """With the options' changes in it."""
        ...

    @property
    def data(self) -> str:
        """The name of the data, for the card."""
        ...

    @property
    def data_sha256(self) -> Mapping[str, str]:
        """By split."""
        ...

    def batch(self, step: int, rng: np.random.Generator) -> Any:
        """One training batch (a tensor, or tuples, lists and dicts of them), on the CPU.

        The loop brings it to the model's device.
        """
        ...

    def loss(self, batch: Any, step: int) -> "Tensor":
        """The scalar to lower; the model is in training mode."""
        ...

    def validate(self) -> dict[str, float]:
        """Scores on validation data, the one that chooses the best step first; higher is better.

        The model is in evaluation mode, without gradients, its weights those to be saved.
        """
        ...

    def finish(self) -> None:
        """Whatever the chosen weights still need, such as an order of modules."""
        ...

    def saved(self) -> dict[str, Any]:
        """Keyword arguments of `checkpoint.save` but path, family, weights and card."""
        ...
