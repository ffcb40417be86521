# SPDX-License-Identifier: Apache-2.0
"""Regularization of a run: changed and mixed images, stochastic depth, rates by layer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from saccade.core.errors import SaccadeError
from saccade.models.data.augment import Augment, Augmentation, mixed
from saccade.models.data.samples.images import Images, Originals, Own, in_batch, read_ahead
from saccade.models.training.options import TrainOptions
from saccade.models.training.start import is_within
from saccade.models.training.task import Recipe, Task

# Options that need the task, and what they need.
NEEDS = {
    "augment": "images",
    "mixup": "images of one class each",
    "cutmix": "images of one class each",
    "label_smoothing": "samples of one class each",
}


def check_regularization(task: Task, options: TrainOptions) -> None:
    """Check that the task and its model use what the options ask for.

    Raises: SaccadeError naming the option.
    """
    for name, needed in NEEDS.items():
        value = getattr(options, name)
        if value not in (None, ()) and name not in task.regularized_by:
            text = ",".join(value) if isinstance(value, tuple) else f"{value:g}"
            raise SaccadeError(
                f"--{name.replace('_', '-')} {text}: expected training on {needed}, but "
                f"{task.family} on {task.data} does not train that way. Leave it out."
            )
    if task.recipe.drop_path:
        set_drop_path(task.model, task.recipe.drop_path)
    if task.recipe.layer_decay < 1 and not task.model.parameter_layers():
        raise SaccadeError(
            f"--layer-decay {task.recipe.layer_decay:g}: this {task.family} has no trunk of "
            "layers. Leave it out."
        )


def set_drop_path(model: nn.Module, share: float) -> None:
    """Give each trunk's blocks a share of dropped branches that rises from 0 to `share`.

    Raises: SaccadeError if the model has no transformer blocks.
    """
    trunks: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "stochastic_depth"):
            trunks.setdefault(name.partition(".")[0], []).append(module)
    if not trunks:
        raise SaccadeError(
            f"--drop-path {share:g}: this model has no transformer blocks whose branches could be "
            "dropped. Leave it out; a NAC has fields for this (--set drop_path or module_dropout)."
        )
    for blocks in trunks.values():
        for index, block in enumerate(blocks):
            block.stochastic_depth = share * index / (len(blocks) - 1) if index else 0.0


def rate_factors(
    layers: Sequence[Sequence[str]], names: Iterable[str], decay: float
) -> dict[str, float]:
    """Return each parameter's factor on the learning rate: 1 in the last layer, less before.

    A parameter belongs to the layer with the longest beginning of its name, or else to the last.
    Source: Clark et al. 2020 (ELECTRA); for vision transformers Bao et al. 2021 (BEiT).
    """
    last = len(layers) - 1
    factors = {}
    for name in names:
        fitting = [
            (len(part), index)
            for index, parts in enumerate(layers)
            for part in parts
            if is_within(name, part)
        ]
        factors[name] = decay ** (last - max(fitting)[1]) if fitting else 1.0
    return factors


NO_CHANGE = Augmentation()
# Limits of `affine` in families that change nothing by default.
AFFINE = Augmentation(shift_px=2.0, degrees=10.0, zoom=0.1)


class ImageChanges:
    """The random changes of a task's images: those of its recipe, or else the family's own.

    With `--augment`, a batch draws one seed, from which every image has its own random numbers. So
    the changes depend neither on the order in which threads make them nor on the process. Crops are
    cut from the `originals`, if there are any.

    A process makes only the rows that it `own`s, and with mixup or cutmix the row that is mixed
    into its first one: to decode one image again costs less than to send it. The other rows of a
    batch are zero.
    """

    def __init__(
        self,
        recipe: Recipe,
        usual: Augmentation = NO_CHANGE,
        *,
        classes: int = 0,
        images: np.ndarray | None = None,
        originals: Images | None = None,
    ) -> None:
        """Prepare the changes of batches, or of these images; mixing needs the number of classes.

        Raises: SaccadeError if the recipe names a change that does not exist.
        """
        self.recipe, self.usual, self.classes = recipe, usual, classes
        words = recipe.augment
        limits = AFFINE if usual == NO_CHANGE else usual
        self._augment = Augment.of(words, limits) if words else None
        self._images, self._originals = images, None
        if originals is not None and self._augment is not None and self._augment.crop:
            self._originals = Originals(originals)

    def batch(
        self, images: np.ndarray, labels: np.ndarray, rng: np.random.Generator, own: Own
    ) -> tuple[np.ndarray, np.ndarray]:
        """Change the images of a batch, and mix them if the recipe has mixup or cutmix.

        Shapes: images [n h w c] uint8, labels [n] -> images; labels, or if images were mixed the
                targets [n classes] float32.
        """
        rows = self._needed(own, len(images))
        made = in_batch(self._changed(images[rows], rows, len(images), rng), rows, len(images))
        return self._mixed(made, labels, rng, own)

    def pixels(self, images: np.ndarray, rng: np.random.Generator, own: Own) -> np.ndarray:
        """Change the images of a batch, without mixing them.

        Shapes: images [n h w c] uint8 -> the same.
        """
        count = len(images)
        rows = _places(own, count)
        return in_batch(self._changed(images[rows], rows, count, rng), rows, count)

    def drawn(
        self, places: np.ndarray, labels: np.ndarray, rng: np.random.Generator, own: Own
    ) -> tuple[np.ndarray, np.ndarray]:
        """Change the images at these places, which have these labels.

        Shapes: places and labels [n] -> as `batch`.
        """
        made = self._made(places, self._needed(own, len(places)), rng)
        return self._mixed(made, labels, rng, own)

    def pixels_at(self, places: np.ndarray, rng: np.random.Generator, own: Own) -> np.ndarray:
        """Change the images at these places, without mixing them.

        Shapes: places [n] -> [n h w c] uint8.
        """
        return self._made(places, _places(own, len(places)), rng)

    def ahead(self, places: Callable[[], np.ndarray], own: Own) -> None:
        """Begin to decode the images that will be asked for next."""
        source = self._images if self._originals is None else self._originals
        read_ahead(source, places, lambda count: self._needed(own, count))

    def _needed(self, own: Own, count: int) -> np.ndarray:
        """Return the rows of a batch whose images this process needs, in order."""
        rows = _places(own, count)
        if not (self.recipe.mixup or self.recipe.cutmix):
            return rows
        return np.union1d(rows, (rows - 1) % max(1, count))

    def _made(self, places: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        assert self._images is not None
        if self._originals is None:
            made = self._changed(self._images[places[rows]], rows, len(places), rng)
        else:
            assert self._augment is not None
            use = self._augment.from_original
            made = self._originals.each(places[rows], use, _numbers(rng, rows))
        return in_batch(made, rows, len(places))

    def _changed(
        self, images: np.ndarray, rows: np.ndarray, count: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Change the images of these rows of a batch of `count`."""
        if self._augment is None:
            return self.usual.by(images, self.usual.draw(count, rng)[:, rows])
        numbers = _numbers(rng, rows)
        changed = [self._augment(*pair) for pair in zip(images, numbers, strict=True)]
        return np.stack(changed) if changed else images

    def _mixed(
        self, images: np.ndarray, labels: np.ndarray, rng: np.random.Generator, own: Own
    ) -> tuple[np.ndarray, np.ndarray]:
        mixup, cutmix = self.recipe.mixup, self.recipe.cutmix
        if not (mixup or cutmix):
            return images, labels
        count = len(images)
        (numbers,) = _numbers(rng, np.zeros(1, np.int64))
        made, targets = mixed(
            images, labels, self.classes, numbers, mixup=mixup, cutmix=cutmix, rows=own(count)
        )
        return in_batch(made, _places(own, count), count), targets


def _places(own: Own, count: int) -> np.ndarray:
    return np.arange(count)[own(count)]


def _numbers(rng: np.random.Generator, rows: np.ndarray) -> list[np.random.Generator]:
    """Draw one seed, and return the generator of each of these rows of a batch."""
    seed = int(rng.integers(2**62))
    return [np.random.default_rng((seed, row)) for row in rows.tolist()]
