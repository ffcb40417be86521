# SPDX-License-Identifier: Apache-2.0
"""The batches of an epoch: the training split augmented, or new canvases for ever."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from saccade.models.data.datasets import Dataset
from saccade.models.data.digits import QUADRANTS, compose, digits
from saccade.models.training_recipes import Recipe

_AUGMENTED_COPIES = 3  # of the training digits, drawn anew each epoch


@dataclass(frozen=True)
class Batch:
    """One training step's samples.

    Shapes: images [b h w c] uint8, labels [b] int64, counts [b 10] float32 (digits-sum only).
    """

    images: Tensor
    labels: Tensor
    counts: Tensor | None = None


def steps_of_epoch(recipe: Recipe, data: Dataset) -> int:
    """How many batches an epoch has."""
    return recipe.steps or -(-len(data.labels) // recipe.batch)


def epoch_batches(
    recipe: Recipe, data: Dataset, rng: np.random.Generator, epoch: int
) -> Iterator[Batch]:
    """Batches of one epoch, which is counted from 0."""
    if recipe.counts_weight:
        yield from _canvases(recipe, rng, epoch)
        return
    order = rng.permutation(len(data.labels))
    for part in np.array_split(order, steps_of_epoch(recipe, data)):
        images = recipe.augmentation(data.images[part], rng)
        yield Batch(torch.from_numpy(images), torch.from_numpy(data.labels[part]))


def _canvases(recipe: Recipe, rng: np.random.Generator, epoch: int) -> Iterator[Batch]:
    images, labels, _ = digits("train")
    pool = [images] + [recipe.augmentation(images, rng) for _ in range(_AUGMENTED_COPIES)]
    images, labels = np.concatenate(pool), np.tile(labels, len(pool))
    # Of the first stages of a curriculum a quarter of the canvases stays mixed.
    stage = epoch / recipe.curriculum_epochs if recipe.curriculum_epochs else 1.0
    most = min(QUADRANTS, 1 + int(stage * QUADRANTS))
    for _ in range(recipe.steps or 1):
        present = np.full(recipe.batch, most)
        mixed = rng.random(recipe.batch) < (0.25 if stage < 1 else 0.0)
        present[mixed] = rng.integers(1, QUADRANTS + 1, mixed.sum())
        canvases, counts = compose(images, labels, recipe.batch, rng, present)
        yield Batch(
            torch.from_numpy(canvases),
            torch.from_numpy(counts @ np.arange(10) % 10),
            torch.from_numpy(counts).float(),
        )
