# SPDX-License-Identifier: Apache-2.0
"""The task that a family gives to the training loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """Everything about a run except its data and seed.

    Units: learning_rate is the peak; steps are optimizer steps; shares are of all steps.
    """

    steps: int
    batch: int
    learning_rate: float
    config: Mapping[str, Any] = field(default_factory=dict)  # fields that the data does not decide
    weight_decay: float = 0.05  # of matrices; see `without_decay`
    without_decay: tuple[str, ...] = ("bias", "norm", "position", "embedding")  # parts of names
    betas: tuple[float, float] = (0.9, 0.98)
    warm_up_steps: int = 100
    schedule: str = "cosine"  # or trapezoid: level, then down over `decay_share`
    decay_share: float = 0.25
    clip_norm: float = 1.0
    precision: str = ""  # of matrix products: bf16 or fp32; empty: bf16 on a GPU that has it
    ema: float = 0.0  # decay of the weight average that is validated and saved; 0: no average
    validate_every: int = 0  # steps; 0: ten times per run
    augment: tuple[str, ...] = ()  # words of `data.augment.Augment`; none: the family's changes
    mixup: float = 0.0  # alpha of mixup and of cutmix; 0: none
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    drop_path: float = 0.0  # share of dropped branches in the last block; 0 in the first
    layer_decay: float = 1.0  # of the learning rate, from each layer to the one before
    extra: Mapping[str, Any] = field(default_factory=dict)  # read by this family's task only


@dataclass(frozen=True)
class BatchImages:
    """Images of a batch that are read and changed when they are needed, in parts.

    Shapes: `make` takes rows of the batch, [n] int64 -> [n h w c] uint8.
    """

    make: Callable[[np.ndarray], np.ndarray]
    rows: np.ndarray

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, part: slice) -> "BatchImages":
        """Return some of the images."""
        return replace(self, rows=self.rows[part])


def with_pixels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch, or a part of one, with its images as tensors [n h w c]."""
    import torch

    return {
        name: torch.from_numpy(x.make(x.rows)) if isinstance(x, BatchImages) else x
        for name, x in batch.items()
    }


@dataclass(frozen=True)
class DataSource:
    """Samples to train and to validate on, and what they decide about the model.

    Shapes: draw(rng, n) -> a batch of n samples by name; calibration: arrays by name.
    """

    name: str
    sha256: Mapping[str, str]  # by split
    fields: Mapping[str, Any]  # of the configuration
    draw: Callable[[np.random.Generator, int], dict[str, Any]]
    validation: Any  # as the family scores it
    calibration: dict[str, np.ndarray]
    labels: tuple[str, ...] = ()  # of the classes
    shots: int | None = None  # training samples per class, if it chose them


def share_of(samples: int, index: int, count: int) -> slice:
    """Return part `index` of `count` of the samples; the parts differ by at most one sample."""
    return slice(index * samples // count, (index + 1) * samples // count)


class Task(ABC):
    """A model in training: its batches, its loss, its score, its checkpoint.

    The loop calls `batch`, then `loss`, with steps from 0. All randomness comes from the generator
    passed to `batch` and from torch's own, so a resumed run continues exactly as the uninterrupted
    one would have. torch's generator is seeded before `task(options)` runs.
    """

    family: str  # as a checkpoint names it
    model: Any  # the model to train; it has `config`
    recipe: Recipe  # with the options applied
    data: str  # the name of the data, for the card
    data_sha256: Mapping[str, str]  # by split
    source: Any  # a `DataSource` in tasks that `take` one
    labels: tuple[str, ...] = ()  # of the classes or answers
    card: Mapping[str, Any] = {}
    shots: int | None = None  # of `--shots`, if the task applies it to its data
    regularized_by: tuple[str, ...] = ()  # options of `regularization.NEEDS` that it applies
    auxiliary: Any = None  # a module trained along with the model, not in the checkpoint
    undivided: tuple[str, ...] = ()  # entries of a batch that every part of it keeps whole

    def take(self, source: DataSource) -> None:
        """Train on this source."""
        self.source, self.data, self.data_sha256 = source, source.name, source.sha256
        self.labels, self.shots = source.labels, source.shots

    @abstractmethod
    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return one training batch: tensors on the CPU, or `BatchImages`, by name.

        Every process draws the same batch, reads the images of its own part, and moves it to the
        model's device.
        """

    @abstractmethod
    def loss(self, batch: Any, step: int) -> "Tensor":
        """Return the scalar to minimize; the model is in training mode."""

    def samples(self, batch: Any) -> int:
        """Return the number of samples, which can be divided among processes."""
        return len(next(value for name, value in batch.items() if name not in self.undivided))

    def part(self, batch: Any, index: int, count: int) -> Any:
        """Return part `index` of `count` of a batch; the parts differ by at most one sample."""
        rows = share_of(self.samples(batch), index, count)
        return {
            name: value if name in self.undivided else value[rows] for name, value in batch.items()
        }

    def weight(self, part: Any) -> float:
        """Return the number of terms of which the loss is the mean: the samples.

        The loss of a batch is the mean of its parts' losses with these weights.
        """
        return self.samples(part)

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return scores on validation data; the first one chooses the best step, higher is better.

        The model is in evaluation mode, without gradients, with the weights that would be saved.
        """

    def calibration(self) -> dict[str, np.ndarray]:
        """Return samples of the training data, as in `checkpoint.Checkpoint.calibration`."""
        arrays: dict[str, np.ndarray] = self.source.calibration
        return arrays

    def redrawn(self, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the parts that a checkpoint of this configuration cannot provide.

        They are beginnings of tensor names, up to a dot: the model's tensors in them are new, and
        the checkpoint's are left out. The tensors of another number of classes need not be named.
        """
        return ()

    def finish(self) -> None:  # noqa: B027  most families need nothing
        """Do what the chosen weights still need, such as ordering the modules."""

    def report(self) -> dict[str, float]:
        """Return the scores for the card."""
        return self.validate()

    def state(self) -> dict[str, Any]:
        """Return the task's state between steps: dicts, lists, tensors, numbers and strings."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state` returned."""

    def saved(self) -> dict[str, Any]:
        """Return the arguments of `checkpoint.save` except path, family, weights and card."""
        config, calibration = self.model.config, self.calibration()
        return {
            "config": config.to_dict(),
            "preprocessing": Preprocessing.of(config) if "image" in calibration else None,
            "labels": self.labels,
            "calibration": calibration,
        }


class ComparingTask(Task):
    """A task whose loss compares samples of a batch with each other, by codes of each sample."""

    @abstractmethod
    def codes(self, batch: Any) -> "tuple[Tensor, ...]":
        """Return the codes of a batch, or of a part of it; their first axis is the samples'."""

    @abstractmethod
    def compare(self, codes: "tuple[Tensor, ...]", batch: Any, step: int) -> "Tensor":
        """Return the loss of a whole batch with these codes; the batch has no images."""

    def loss(self, batch: Any, step: int) -> "Tensor":
        """Return the loss of a batch."""
        return self.compare(self.codes(batch), batch, step)
