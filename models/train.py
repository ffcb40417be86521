# SPDX-License-Identifier: Apache-2.0
"""One training loop: recipe and data to a checkpoint that says how good it is."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.models.checkpoint import Checkpoint, save
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.errors import SaccadeError, require
from saccade.plugins.files import refuse_existing
from saccade.plugins.progress import Advance, progress

if TYPE_CHECKING:
    from saccade.models.nac import NAC
    from saccade.models.training_recipes import Recipe

CALIBRATION_IMAGES = 256
SMALL_BUDGET = 0.125  # the best epoch is the one whose full and small model are best on average


@dataclass(frozen=True)
class TrainOptions:
    """What to learn and with what; what is not given comes from the data set's recipe."""

    out: Path  # checkpoint to write, ends in .safetensors
    data: str = "digits"  # digits, digits-sum, a folder of class folders, or an .npz
    epochs: int | None = None  # passes over the training data
    modules: int | None = None  # processor modules, 1 to 4096
    dim: int | None = None  # width of a module's state
    propagator_layers: int | None = None  # rounds of messages between the modules
    learning_rate: float | None = None  # at its highest
    batch: int | None = None  # images a step
    module_dropout: bool = True  # keep only some of the modules in a training step
    side_px: int = 32  # to which a folder's images are resized
    seed: int = 0  # of the weights, the batches and the dropout
    threads: int = 1  # of the processor; small models gain nothing from more
    force: bool = False  # replace what stands at --out


def train(options: TrainOptions) -> Checkpoint:
    """Train a NAC and write it with 256 training images for calibration and a card.

    Raises: SaccadeError if an option, the data or the place of the output cannot be used.
    """
    _check(options)
    torch: Any = require("torch", extra="export")
    training = load_data(options.data, "train", side_px=options.side_px)
    validation = load_data(options.data, "validation", side_px=options.side_px)
    recipe = _recipe(options, training)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            model, best_epoch = _fit(options, recipe, training, validation)
        modules = model.config.modules
        keeping = [budget for budget in recipe.budgets if math.floor(budget * modules + 0.5)]
        scores = score(model, validation, keeping)
    finally:
        torch.set_num_threads(threads)
    return _write(options, recipe, model, training, validation, best_epoch, scores)


def score(
    model: "NAC", data: Dataset, budgets: Sequence[float], *, most: int | None = None
) -> dict[str, float]:
    """Share of right answers by budget, from the first `most` samples.

    Raises: SaccadeError if a budget keeps no module.
    """
    import torch

    images = torch.from_numpy(data.images[:most])
    labels = torch.from_numpy(data.labels[:most])
    scores = {}
    for budget in budgets:
        small = model.prune(budget).eval()
        with torch.inference_mode():
            right = sum(
                int((small(images[i : i + 200]).argmax(1) == labels[i : i + 200]).sum())
                for i in range(0, len(labels), 200)
            )
        scores[f"{budget:g}"] = right / len(labels)
    return scores


def _check(options: TrainOptions) -> None:
    out = options.out
    if out.suffix != ".safetensors":
        raise SaccadeError(f"--out is {out}, expected a name that ends in .safetensors.")
    refuse_existing(out, force=options.force)
    if out.is_dir():
        raise SaccadeError(f"--out is the folder {out}, expected a file. Choose another name.")
    limits = {"epochs": 1, "batch": 1, "side_px": 4, "seed": 0, "threads": 1}
    for name, least in limits.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise SaccadeError(f"--{flag} is {value}, expected at least {least}.")
    rate = options.learning_rate
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise SaccadeError(f"--learning-rate is {rate}, expected a number above 0.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaccadeError(f"{out}: cannot be written ({error}). Choose another place.") from error
    if not os.access(out.parent, os.W_OK):
        raise SaccadeError(f"{out.parent}: cannot be written. Choose another place with --out.")


def _recipe(options: TrainOptions, data: Dataset) -> "Recipe":
    from saccade.models.training_recipes import recipe_for

    _, height, width, channels = data.images.shape
    recipe = recipe_for(options.data, height, width)
    pixels = data.images.reshape(-1, channels) / 255
    config = recipe.config | {
        "height_px": height,
        "width_px": width,
        "channels": channels,
        "mean": tuple(round(float(value), 4) for value in pixels.mean(0)),
        "std": tuple(max(round(float(value), 4), 1e-3) for value in pixels.std(0)),
        "classes": len(data.class_names),
        "seed": options.seed,
    }
    for name in ("modules", "dim", "propagator_layers"):
        if getattr(options, name) is not None:
            config[name] = getattr(options, name)
    modules = max(1, config["modules"])
    fewest = recipe.keep[0] / modules if options.module_dropout else 1.0
    config["module_dropout"] = min(1.0, fewest)
    changes = {
        name: getattr(options, name)
        for name in ("epochs", "learning_rate", "batch")
        if getattr(options, name) is not None
    }
    return replace(recipe, config=config, **changes)


def _fit(
    options: TrainOptions, recipe: "Recipe", training: Dataset, validation: Dataset
) -> tuple["NAC", int]:
    """The model of the best epoch, and which it was."""
    from saccade.models.nac import NAC, NACConfig
    from saccade.models.training_batches import epoch_batches, steps_of_epoch
    from saccade.models.training_loop import Trainer

    model = NAC(NACConfig.from_dict(recipe.config))
    rng = np.random.default_rng(options.seed)
    steps = steps_of_epoch(recipe, training)
    trainer = Trainer(model, recipe, total_steps=steps * recipe.epochs, rng=rng)
    best, best_epoch, best_weights = -1.0, 0, model.state_dict()
    with progress(f"train on {training.name}", steps * recipe.epochs) as advance:
        for epoch in range(1, recipe.epochs + 1):
            for batch in epoch_batches(recipe, training, rng, epoch - 1):
                trainer.step(batch)
                advance()
            if epoch % recipe.validate_epochs and epoch != recipe.epochs:
                continue
            found = _validate(model, recipe, validation, epoch, advance)
            if found >= best:
                best, best_epoch = found, epoch
                best_weights = {key: value.clone() for key, value in model.state_dict().items()}
    trainer.close()
    model.load_state_dict(best_weights)
    model.rank_modules()
    return model.eval(), best_epoch


def _validate(
    model: "NAC", recipe: "Recipe", validation: Dataset, epoch: int, advance: Advance
) -> float:
    model.rank_modules()
    small = max(SMALL_BUDGET, 1 / model.config.modules)
    scores = score(model, validation, (1.0, small), most=recipe.validate_images)
    full, pruned = scores.values() if small < 1 else list(scores.values()) * 2
    advance(0, note=f"epoch {epoch}: {100 * full:.1f} %, budget {small:g}: {100 * pruned:.1f} %")
    return (full + pruned) / 2


def _write(
    options: TrainOptions,
    recipe: "Recipe",
    model: "NAC",
    training: Dataset,
    validation: Dataset,
    best_epoch: int,
    scores: dict[str, float],
) -> Checkpoint:
    config = model.config
    preprocessing = Preprocessing(
        config.height_px, config.width_px, config.channels, config.mean, config.std
    )
    chosen = np.random.default_rng(0).permutation(len(training.labels))[:CALIBRATION_IMAGES]
    card = {
        "data": training.name,
        "data_sha256": {"train": training.sha256, "validation": validation.sha256},
        "seed": options.seed,
        "command": command_line(options, training.name),
        "epochs": recipe.epochs,
        "best_epoch": best_epoch,
        "validation": scores,
        "validation_images": len(validation.labels),
        "versions": {name: version(name) for name in ("saccade", "torch", "numpy", "safetensors")}
        | {"python": platform.python_version()},
    }
    return save(
        options.out,
        family="nac",
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=preprocessing,
        labels=training.class_names,
        calibration_images=training.images[chosen],
        calibration_labels=training.labels[chosen],
        card=card,
    )


def command_line(options: TrainOptions, data: str) -> str:
    """The command that repeats a training run, without the folders of this machine."""
    words = ["saccade train nac", f"--data {data}", f"--out {options.out.name}"]
    given = TrainOptions(out=options.out)
    for name in ("epochs", "modules", "dim", "propagator_layers", "learning_rate", "batch"):
        if getattr(options, name) is not None:
            words.append(f"--{name.replace('_', '-')} {getattr(options, name)}")
    if not options.module_dropout:
        words.append("--no-module-dropout")
    if options.side_px != given.side_px:
        words.append(f"--side-px {options.side_px}")
    words += [f"--seed {options.seed}", f"--threads {options.threads}"]
    return " ".join(words)
