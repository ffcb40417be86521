# SPDX-License-Identifier: Apache-2.0
"""Training of a second-order transformer, with any head, to classify images or texts."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.budget import ComputeBudget
from saccade.models.data.augment import Augmentation
from saccade.models.data.datasets import image_fields, load_data, plain
from saccade.models.data.samples.source import DataDescription
from saccade.models.data.scene_texts import SCENE_LABELS, scene_label
from saccade.models.data.shapes import Scenes, scene_batch, scenes
from saccade.models.data.signs import CLASS_NAMES, resized, sign_batch, signs
from saccade.models.data.splits import calibration_rows
from saccade.models.data.token_states import TokenStates, token_states
from saccade.models.families import new_model
from saccade.models.image_decoding import ImageInput
from saccade.models.sot.config import SMALL
from saccade.models.sot.model import SoT, SoTConfig
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import DataSource, Recipe, Task

# Inputs by name, such as image [n h w c] uint8, with labels [n] int64 or, in a batch of mixed
# images, targets [n classes] float32.
Samples = dict[str, np.ndarray]
KEPT_BYTES = 3 * 2**19  # of calibration signs, half of a shipped file
SCENE_PX = 48  # 256 calibration images fit into the 3 MiB of a shipped file
_SEEN = 1_000  # images used for mean and std
_ONE = (1, 1)  # objects per scene


def _fields(images: np.ndarray, seen: np.ndarray, classes: int) -> dict[str, Any]:
    """Return the fields for these images, with 8 tokens per side."""
    patch_px = patch_side(*images.shape[1:3])
    return image_fields(images, seen) | {"patch_px": patch_px, "classes": classes}


def image_source(
    options: TrainOptions, recipe: Recipe, *, validation: int, calibration: int
) -> DataSource:
    """Return the source that the options name: `shapes` (default), signs, digits, or own images.

    Raises: SaccadeError if there is no such data.
    """
    name = options.data or "shapes"
    if name == "shapes":
        return _shapes(recipe, validation, calibration)
    if name == "signs":
        preprocessing = options.asked.preprocessing or plain(options.new_side_px, 1)
        return _signs(recipe, preprocessing.wanted(), validation, calibration)
    asked, side_px = options.asked, options.new_side_px
    training = load_data(name, "train", side_px=side_px, asked=asked)
    held_out = load_data(name, "validation", side_px=side_px, asked=asked)
    images, labels = training.images, training.labels
    usual = Augmentation(shift_px=images.shape[1] / 12, degrees=10, zoom=0.1)
    classes = len(training.class_names)
    changes = ImageChanges(
        recipe, usual, classes=classes, images=images, originals=training.originals
    )

    def draw(rng: np.random.Generator, count: int) -> dict[str, Any]:
        def places(rng: np.random.Generator) -> np.ndarray:
            return rng.integers(len(labels), size=count)

        chosen = places(rng)
        image, targets = changes.chosen(chosen, rng, labels[chosen], then=places)
        return {"image": image, "labels": targets}

    some = calibration_rows(len(labels), calibration)
    return DataSource(
        name=training.name,
        sha256={"train": training.sha256, "validation": held_out.sha256},
        labels=training.class_names,
        fields=_fields(held_out.images, images[:_SEEN], classes),
        draw=draw,
        validation={"image": held_out.images, "labels": held_out.labels},
        calibration={"image": images[some], "labels": labels[some]},
        shots=options.shots,
    )


def patch_side(height: int, width: int) -> int:
    """Return the common divisor of both sides (at least 2 if possible) nearest to an eighth.

    Units: pixels.
    """
    common = math.gcd(height, width)
    divisors = [side for side in range(2, common + 1) if common % side == 0] or [1]
    return min(divisors, key=lambda side: abs(side - max(height, width) / 8))


def _shapes(recipe: Recipe, validation: int, calibration: int) -> DataSource:
    held_out = scenes("validation", validation, side_px=SCENE_PX, objects=_ONE)
    known = scenes("train", calibration, side_px=SCENE_PX, objects=_ONE)

    def draw(rng: np.random.Generator, count: int) -> Samples:
        return _labelled(scene_batch(rng, count, side_px=SCENE_PX, objects=_ONE))

    return _endless("shapes", recipe, SCENE_LABELS, draw, _labelled(held_out), _labelled(known))


def _signs(recipe: Recipe, wanted: ImageInput, validation: int, calibration: int) -> DataSource:
    def fitted(drawn: tuple[np.ndarray, np.ndarray]) -> Samples:
        return {"image": resized(drawn[0], wanted), "labels": drawn[1]}

    source = _endless(
        "signs",
        recipe,
        CLASS_NAMES,
        lambda rng, count: fitted(sign_batch(rng, count)),
        fitted(signs("validation", validation)),
        fitted(signs("train", calibration)),
    )
    kept = KEPT_BYTES // source.calibration["image"][0].nbytes
    fewer = {name: array[:kept] for name, array in source.calibration.items()}
    return replace(source, calibration=fewer)


def _endless(
    name: str,
    recipe: Recipe,
    labels: tuple[str, ...],
    draw: Callable[[np.random.Generator, int], Samples],
    held_out: Samples,
    known: Samples,
) -> DataSource:
    """Return a source whose training samples are new in every batch."""
    changes = ImageChanges(recipe, classes=len(labels))

    def changed(rng: np.random.Generator, count: int) -> dict[str, Any]:
        drawn = draw(rng, count)
        image, targets = changes.drawn(drawn["image"], rng, drawn["labels"])
        return {"image": image, "labels": targets}

    return DataSource(
        name=name,
        sha256={"train": _digest(known["image"]), "validation": _digest(held_out["image"])},
        labels=labels,
        fields=_fields(held_out["image"], known["image"], len(labels)),
        draw=changed,
        validation=held_out,
        calibration=known,
    )


def _labelled(drawn: Scenes) -> Samples:
    labels = np.array([scene_label(objects) for objects in drawn.objects], np.int64)
    return {"image": drawn.images, "labels": labels}


def _digest(images: np.ndarray) -> str:
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()


def _rows(data: TokenStates, rows: np.ndarray) -> Samples:
    return {name: array[rows] for name, array in (data.inputs | {"labels": data.labels}).items()}


def text_source(options: TrainOptions, *, calibration: int) -> DataSource:
    """Return the token states in the file that the options name.

    Raises: SaccadeError if there is none, if it cannot be used, or `--set` contradicts it.
    """
    if options.data is None:
        raise SaccadeError(
            "--set input=tokens: texts are given as the states of a language model, which saccade "
            "does not generate. Pass --data with an .npz, .safetensors or .parquet of tokens, "
            "lengths and labels."
        )
    given = DataDescription.of(options.labels, options.data_root)
    splits = ("train", "validation")
    train, held_out = (token_states(options.data, split, given) for split in splits)
    _, most, width = train.tokens.shape
    fields = {
        "input": "tokens",
        "max_tokens": most,
        "dim": width,
        "classes": len(train.class_names),
        "heads": 1,  # states of a text have no trunk here
    }
    for name in ("max_tokens", "dim", "classes"):
        if options.set.get(name, fields[name]) != fields[name]:
            raise SaccadeError(
                f"--set {name}={options.set[name]}: the data has {fields[name]}. Leave it out."
            )
    total = len(train.labels)
    return DataSource(
        name=train.name,
        sha256={"train": train.sha256, "validation": held_out.sha256},
        labels=train.class_names,
        fields=fields,
        draw=lambda rng, count: _rows(train, rng.integers(total, size=count)),
        validation=held_out.inputs | {"labels": held_out.labels},
        calibration=_rows(train, calibration_rows(total, calibration)),
    )


CALIBRATION, VALIDATION = 256, 1000
_BATCH = 100  # samples per pass in validation
QUICK = Recipe(steps=1200, batch=64, learning_rate=1e-3, config=SMALL)
SHIPPED = Recipe(
    steps=3_000, batch=64, learning_rate=1e-3, config=SMALL, warm_up_steps=200, ema=0.999
)


def task(options: TrainOptions) -> "SoTTask":
    """Train a SoT on shapes (the default: color and shape of one object), signs or own images.

    `--set input=tokens` trains it on a file of token states. All heads have the same recipe;
    `--set fusion=class` is the baseline.
    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
    if options.value("input", None) == "tokens":
        source = text_source(options, calibration=CALIBRATION)
    else:
        source = image_source(options, recipe, validation=VALIDATION, calibration=CALIBRATION)
    return SoTTask(options, recipe, source)


class SoTTask(Task):
    """A `training.task.Task`: cross entropy, with late fusion of both classifiers."""

    family = "sot"
    model: SoT

    def __init__(self, options: TrainOptions, recipe: Recipe, source: DataSource) -> None:
        config = chosen_config(SoTConfig, options, recipe.config, source.fields)
        self.recipe = recipe
        self.take(source)
        kind = "texts" if config.input == "tokens" else "images"
        self.regularized_by = ("label_smoothing",)
        if kind == "images":
            self.regularized_by += ("augment", "mixup", "cutmix")
        self.card = {f"validation_{kind}": len(source.validation["labels"])}
        self.model = new_model(SoT, config)

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return `Samples`: the model's inputs, and labels or targets."""
        return _tensors(self.source.draw(rng, self.recipe.batch))

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the cross entropy of the fused logits; with late fusion, of each classifier."""
        x, length = _given(batch)
        smoothing = self.recipe.label_smoothing
        return self.model.loss(x, batch["labels"], length, label_smoothing=smoothing)

    def validate(self) -> dict[str, float]:
        """Return top-1 of the model as trained."""
        return score(self.model, self.source.validation, self.model.budgets()[:1])

    def report(self) -> dict[str, float]:
        """Return top-1 of every head in the default export."""
        return score(self.model, self.source.validation, self.model.budgets())


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }


def _given(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the model's inputs: an image, or tokens with their length."""
    if "tokens" in inputs:
        return inputs["tokens"], inputs["length"]
    return inputs["image"], None


@torch.inference_mode()
def score(model: SoT, data: Samples, budgets: Sequence[ComputeBudget]) -> dict[str, float]:
    """Return the share of right answers by budget."""
    device, scores, count = next(model.parameters()).device, {}, len(data["labels"])
    for budget in budgets:
        chosen, right = model.at(budget).eval(), 0
        for at in range(0, count, _BATCH):
            given = _tensors({name: np.asarray(x[at : at + _BATCH]) for name, x in data.items()})
            x, length = _given({name: tensor.to(device) for name, tensor in given.items()})
            right += int((chosen(x, length).argmax(1).cpu() == given["labels"]).sum())
        scores[budget.label] = right / count
    return scores
