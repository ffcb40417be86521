# SPDX-License-Identifier: Apache-2.0
"""The images of a step: the training split augmented, or new canvases for ever."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.models.data.datasets import Dataset
from saccade.models.data.digits import QUADRANTS, compose, digits
from saccade.models.training.task import Recipe

_AUGMENTED_COPIES = 3  # of the training digits, drawn anew each epoch


class ImageBatches:
    """Batches by step; what an epoch draws at its beginning is remembered until the next.

    An epoch is once through the data in a new order. Of digits-sum it is `epoch_steps` batches of
    canvases made of the training digits and of augmented copies that are new in each epoch.
    """

    def __init__(self, recipe: Recipe, data: Dataset) -> None:
        self.recipe, self.dataset = recipe, data
        self.steps: int = recipe.extra["epoch_steps"]
        self.canvases = recipe.extra["canvases"]
        self._images, self._labels = data.images, data.labels
        if self.canvases:
            self._images, self._labels, _ = digits("train")
        self._epoch: np.ndarray | None = None  # an order, or the copies

    def at(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """The batch of a step, which is counted from 0.

        Shapes: images [b h w c] uint8, labels [b] int64, counts [b 10] float32 (digits-sum only).
        """
        augmentation = self.recipe.extra["augmentation"]
        if step % self.steps == 0 or self._epoch is None:
            if self.canvases:
                copies = [augmentation(self._images, rng) for _ in range(_AUGMENTED_COPIES)]
                self._epoch = np.concatenate(copies)
            else:
                self._epoch = rng.permutation(len(self._labels))
        if self.canvases:
            return self._canvases(step // self.steps, rng)
        part = np.array_split(self._epoch, self.steps)[step % self.steps]
        images = augmentation(self._images[part], rng)
        return {
            "images": torch.from_numpy(images),
            "labels": torch.from_numpy(self._labels[part]),
        }

    def _canvases(self, epoch: int, rng: np.random.Generator) -> dict[str, Tensor]:
        images = np.concatenate([self._images, self._epoch])
        labels = np.tile(self._labels, 1 + _AUGMENTED_COPIES)
        # Of the first stages of a curriculum a quarter of the canvases stays mixed.
        curriculum = self.recipe.extra["curriculum_epochs"]
        stage = epoch / curriculum if curriculum else 1.0
        present = np.full(self.recipe.batch, min(QUADRANTS, 1 + int(stage * QUADRANTS)))
        mixed = rng.random(self.recipe.batch) < (0.25 if stage < 1 else 0.0)
        present[mixed] = rng.integers(1, QUADRANTS + 1, mixed.sum())
        canvases, counts = compose(images, labels, self.recipe.batch, rng, present)
        return {
            "images": torch.from_numpy(canvases),
            "labels": torch.from_numpy(counts @ np.arange(10) % 10),
            "counts": torch.from_numpy(counts).float(),
        }

    def state(self) -> dict[str, Any]:
        """What the current epoch drew."""
        return {"epoch": None if self._epoch is None else torch.from_numpy(self._epoch)}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._epoch = None if state["epoch"] is None else state["epoch"].numpy()
