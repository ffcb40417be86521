# SPDX-License-Identifier: Apache-2.0
"""Training of a NAC to classify images: module dropout, graph prior, scores by budget."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.data.datasets import Dataset, image_fields, load_data
from saccade.models.data.digits import QUADRANTS, compose, digits
from saccade.models.data.splits import CALIBRATION_SAMPLES, calibration_rows
from saccade.models.nac.model import NAC
from saccade.models.nac.training.circuit_task import CircuitTask
from saccade.models.nac.training.recipes import SETTABLE, recipe_for, with_epochs, with_extra
from saccade.models.nac.training.sequences import takes_sequences
from saccade.models.nac.training.sequences import task as sequence_task
from saccade.models.training.options import TrainOptions, chosen_recipe
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import Recipe, Task

_AUGMENTED_COPIES = 3  # of the training digits, drawn again in each epoch


class ImageBatches:
    """Batches by step; draws at the beginning of an epoch are kept until the next.

    An epoch is one pass through the data in a new order. For digits-sum it is `epoch_steps` batches
    of canvases, composed of the training digits and of augmented copies that are new in each epoch.
    """

    def __init__(self, recipe: Recipe, data: Dataset) -> None:
        self.recipe, self.dataset = recipe, data
        self.steps: int = recipe.extra["epoch_steps"]
        self.canvases = recipe.extra["canvases"]
        self._images, self._labels = data.images, data.labels
        if self.canvases:
            self._images, self._labels, _ = digits("train")
        self._epoch: np.ndarray | None = None  # an order, or the copies
        self._augmentation = recipe.extra["augmentation"]
        self._changes = ImageChanges(
            recipe,
            self._augmentation,
            classes=len(data.class_names),
            images=data.images,
            originals=data.originals,
        )

    def at(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return the batch of a step; steps count from 0.

        Shapes: images [b h w c] uint8, labels [b] int64 or, of mixed images, targets [b classes]
                float32, counts [b 10] float32 (digits-sum only).
        """
        if step % self.steps == 0 or self._epoch is None:
            if self.canvases:
                copies = [self._augmentation(self._images, rng) for _ in range(_AUGMENTED_COPIES)]
                self._epoch = np.concatenate(copies)
            else:
                self._epoch = rng.permutation(len(self._labels))
        if self.canvases:
            return self._canvases(step // self.steps, rng)
        parts, place = np.array_split(self._epoch, self.steps), step % self.steps
        part = parts[place]
        later = parts[place + 1] if place + 1 < len(parts) else part[:0]
        images, targets = self._changes.chosen(
            part, rng, self._labels[part], then=lambda rng: later
        )
        return {"images": images, "labels": torch.from_numpy(targets)}

    def _canvases(self, epoch: int, rng: np.random.Generator) -> dict[str, Tensor]:
        images = np.concatenate([self._images, self._epoch])
        labels = np.tile(self._labels, 1 + _AUGMENTED_COPIES)
        # In the first stages of a curriculum, a quarter of the canvases stays mixed.
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
        """Return the state of the current epoch's draws."""
        return {"epoch": None if self._epoch is None else torch.from_numpy(self._epoch)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._epoch = None if state["epoch"] is None else state["epoch"].numpy()


DIGITS = 10
SUMS = 9 * 4 + 1  # four digits add up to 0 to 36


class Auxiliary(nn.Module):
    """Linear heads that exist only during training.

    A sum modulo 10 alone tells a network next to nothing about single digits. So linear layers
    predict how often each digit is on the canvas (squared error) and the plain sum (cross entropy
    over 0 to 36): one from the state before the last layer, and one from each module's state after
    each propagator.
    """

    DEEP_WEIGHT = 0.5  # weight of the modules' predictions, relative to the embedding's
    COUNTS_WEIGHT = 2.0  # squared errors are small compared to cross entropies

    def __init__(self, model: NAC) -> None:
        super().__init__()
        dim = model.config.dim
        self.heads = nn.ModuleList(
            nn.Linear(dim, DIGITS + SUMS) for _ in range(1 + len(model.propagators))
        )
        self._states: dict[int, Tensor] = {}
        self._hooks: list[Any] = [model.head.register_forward_pre_hook(self._remember_embedding)]
        for index, propagator in enumerate(model.propagators):
            self._hooks.append(propagator.register_forward_hook(self._remember(index + 1)))

    def _remember_embedding(self, module: nn.Module, inputs: Any) -> None:
        self._states[0] = inputs[0]

    def _remember(self, index: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._states[index] = output

        return hook

    def loss(self, counts: Tensor) -> Tensor:
        """Return the loss of the model's latest forward pass.

        Shapes: counts [b 10], how often each digit is on the canvas -> scalar.
        """
        total = counts.new_zeros(())
        sums = (counts * torch.arange(DIGITS, device=counts.device)).sum(1).long()
        for index, head in enumerate(self.heads):
            predicted = head(self._states[index]).float()
            weight = self.DEEP_WEIGHT if index else 1.0
            wanted, wanted_sums = counts, sums
            if predicted.dim() == 3:
                modules = predicted.shape[1]
                wanted = counts.unsqueeze(1).expand(-1, modules, -1)
                wanted_sums = sums.repeat_interleave(modules)
            squared = F.mse_loss(predicted[..., :DIGITS], wanted)
            crossed = F.cross_entropy(predicted[..., DIGITS:].flatten(0, -2), wanted_sums)
            total = total + weight * (self.COUNTS_WEIGHT * squared + crossed)
        return total

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


_ORDER_STEPS = 20  # steps between rankings of the modules


_EXPRESSIONS = "listops"  # data that consists of characters, not of images


def task(options: TrainOptions) -> Task:
    """Train a NAC on digits (the default), digits-sum, listops, or the user's own samples.

    For images, both recipes are the same: each data set has one. `--set input=points`, bytes,
    characters or tokens, `--set input_sets=2` and conditions train it on other samples.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    data = options.data or "digits"
    if data == _EXPRESSIONS:
        from saccade.models.nac.training import listops

        return listops.task(options)
    if takes_sequences(options):
        return sequence_task(options)
    asked, side_px = options.asked, options.new_side_px
    training = load_data(data, "train", side_px=side_px, also=(_EXPRESSIONS,), asked=asked)
    validation = load_data(data, "validation", side_px=side_px, asked=asked)
    return NACTask(options, training, validation)


class NACTask(CircuitTask):
    """A `CircuitTask` on images; the last `whole_share` of the steps may keep all modules."""

    at_once = 50

    def __init__(self, options: TrainOptions, training: Dataset, validation: Dataset) -> None:
        self.training = training
        self.data, self.labels = training.name, training.class_names
        self.data_sha256 = {"train": training.sha256, "validation": validation.sha256}
        self.card = {"validation_images": len(validation.labels)}
        trunk = options.given_trunk
        patch_px = trunk.fields["patch_px"] if trunk is not None else 0
        size = training.images.shape[1:3]
        recipe = recipe_for(options.data or "digits", *size, patch_px=patch_px)
        recipe = chosen_recipe(options, quick=recipe, shipped=recipe)
        recipe = with_extra(recipe, options.set)
        recipe = with_epochs(recipe, len(training.labels), steps=options.steps)
        given = image_fields(training.images) | {"classes": len(training.class_names)}
        super().__init__(options, recipe, given, SETTABLE)
        self.regularized_by = ("label_smoothing",)
        if not self.extra["canvases"]:  # which are composed of augmented digits, and are counted
            self.regularized_by += ("augment", "mixup", "cutmix")
        self.scored = (validation.images,), validation.labels
        self.ranked = (np.asarray(training.images[:CALIBRATION_SAMPLES]),)
        # Canvases are composed of all training digits.
        self.shots = None if self.extra["canvases"] else options.shots
        self.auxiliary = Auxiliary(self.model) if self.extra["counts_weight"] else None
        self.batches = ImageBatches(self.recipe, training)
        self._order: Tensor | None = None

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w c] uint8, labels [b], and `modules` [m] if some are left out."""
        return self.batches.at(step, rng) | self.modules(step, rng)

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the loss of the class, the graph prior, and the digits if they are known."""
        logits = self.model(batch["images"], modules=batch.get("modules")).float()
        smoothing = self.recipe.label_smoothing
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
        if self.auxiliary is not None:
            loss = loss + self.extra["counts_weight"] * self.auxiliary.loss(batch["counts"])
        return self.with_graph_prior(loss)

    def most_modules(self, step: int) -> int:
        """Return the most modules of a step: all in the last `whole_share` of the steps."""
        whole = step >= (1 - self.extra["whole_share"]) * self.recipe.steps
        return self.model.config.modules if whole else super().most_modules(step)

    def order(self, step: int) -> Tensor:
        """Return the modules as they were ranked in the last 20 steps."""
        if step % _ORDER_STEPS == 0 or self._order is None:
            self._order = self.rank().cpu().clone()
        return self._order

    def calibration(self) -> dict[str, np.ndarray]:
        """Return 256 training images with their labels."""
        chosen = calibration_rows(len(self.training.labels))
        return {"image": self.training.images[chosen], "labels": self.training.labels[chosen]}

    def state(self) -> dict[str, Any]:
        """Return the batches' order, the modules' order and the graph prior's permutation."""
        return super().state() | {"batches": self.batches.state(), "order": self._order}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        super().restore(state)
        self.batches.restore(state["batches"])
        self._order = state["order"]
