# SPDX-License-Identifier: Apache-2.0
"""Regularization of a run: changed and mixed images, stochastic depth, rates by layer."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from torch import nn

from saccade.core.errors import SaccadeError
from saccade.core.options import flag
from saccade.models.data.augment import Augment, Augmentation, ImageMix
from saccade.models.data.samples.images import Images, Originals
from saccade.models.training.options import TrainOptions
from saccade.models.training.start import is_within
from saccade.models.training.task import BatchImages, Recipe, Task

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
                f"{flag(name)} {text}: expected training on {needed}, but "
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


Read = Callable[[np.ndarray], np.ndarray]  # rows of a batch -> their images


class ImageChanges:
    """The random changes of a task's images: those of its recipe, or else the family's own.

    With `--augment`, a batch draws one seed, from which every image has its own random numbers. So
    the changes depend neither on the order in which threads make them nor on the process. Crops are
    cut from the `originals`, if there are any.

    Images are changed when they are needed: a process reads its own and, with mixup or cutmix, the
    one that is mixed into its first one. To decode it again costs less than to send it.
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
        """Prepare the changes of drawn images, or of these; mixing needs the number of classes.

        Raises: SaccadeError if the recipe names a change that does not exist.
        """
        self.recipe, self.usual, self.classes = recipe, usual, classes
        words = recipe.augment
        limits = AFFINE if usual == NO_CHANGE else usual
        self._augment = Augment.of(words, limits) if words else None
        self._images, self._originals = images, None
        if originals is not None and self._augment is not None and self._augment.crop:
            self._originals = Originals(originals)

    def drawn(
        self, images: np.ndarray, rng: np.random.Generator, labels: np.ndarray | None = None
    ) -> tuple[BatchImages, Any]:
        """Change these images, and mix them if they have labels and the recipe asks for it.

        Shapes: images [n h w c] uint8, labels [n] -> images; labels, or if images were mixed the
                targets [n classes] float32.
        """
        read = self._changed(lambda rows: images[rows], len(images), rng)
        return self._mixed(read, len(images), images.shape[1:3], labels, rng)

    def chosen(
        self,
        places: np.ndarray,
        rng: np.random.Generator,
        labels: np.ndarray | None = None,
        *,
        then: Callable[[np.random.Generator], np.ndarray] | None = None,
    ) -> tuple[BatchImages, Any]:
        """Change the images at these places; those of the next batch are decoded ahead.

        `then` returns their places, for a copy of the generator as it is after this batch.

        Shapes: places and labels [n] -> as `drawn`.
        """
        known, originals, augment = self._images, self._originals, self._augment
        assert known is not None
        if originals is None or augment is None:
            read = self._changed(lambda rows: known[places[rows]], len(places), rng)
        else:
            use, seed = augment.from_original, _seed(rng)

            def read(rows: np.ndarray) -> np.ndarray:
                return originals.each(places[rows], use, _numbers(seed, rows))

        source: Any = known if originals is None else originals

        def read_ahead(rows: np.ndarray) -> np.ndarray:
            made = read(rows)
            if then is not None and isinstance(source, Images | Originals):
                later = then(deepcopy(rng))
                source.ahead(later[rows[rows < len(later)]])
            return made

        return self._mixed(read_ahead, len(places), known.shape[1:3], labels, rng)

    def _changed(self, read: Read, count: int, rng: np.random.Generator) -> Read:
        augment = self._augment
        if augment is None:
            drawn = self.usual.draw(count, rng)
            return lambda rows: self.usual.by(read(rows), drawn[:, rows])
        seed = _seed(rng)
        return lambda rows: np.stack([*map(augment, read(rows), _numbers(seed, rows))])

    def _mixed(
        self,
        read: Read,
        count: int,
        size: tuple[int, ...],
        labels: np.ndarray | None,
        rng: np.random.Generator,
    ) -> tuple[BatchImages, Any]:
        mixup, cutmix = self.recipe.mixup, self.recipe.cutmix
        if labels is None or not (mixup or cutmix):
            return BatchImages(read, np.arange(count)), labels
        (numbers,) = _numbers(_seed(rng), np.zeros(1, np.int64))
        mix = ImageMix.draw(size[0], size[1], numbers, mixup=mixup, cutmix=cutmix)

        def mixed(rows: np.ndarray) -> np.ndarray:
            before = (rows - 1) % count
            needed = np.union1d(rows, before)
            images = read(needed)
            both = (images[np.searchsorted(needed, part)] for part in (rows, before))
            return mix.images(*both)

        return BatchImages(mixed, np.arange(count)), mix.targets(labels, self.classes)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**62))


def _numbers(seed: int, rows: np.ndarray) -> list[np.random.Generator]:
    """Return the generator of each of these rows of a batch."""
    return [np.random.default_rng((seed, row)) for row in rows.tolist()]
