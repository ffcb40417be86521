# SPDX-License-Identifier: Apache-2.0
"""Training of slot attention: it learns to reconstruct images and never sees a mask."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.data.segmented_images import segmented_images
from saccade.models.data.shapes import scene_batch, scenes
from saccade.models.data.tetrominoes import PIECES, tetromino_batch, tetrominoes
from saccade.models.families import new_model
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.decoder import segmentation
from saccade.models.slot_attention.fold import reordered_attention
from saccade.models.slot_attention.initial import initial_states
from saccade.models.slot_attention.model import SlotModel, random_pose
from saccade.models.training.options import TrainOptions, chosen_config, chosen_recipe
from saccade.models.training.regularization import ImageChanges
from saccade.models.training.task import DataSource, Recipe, Task

SOURCE_FIELDS = ("positions", "side_px")  # keys of --set, for generated scenes
CALIBRATION = 256
_SIDES = {"tetrominoes": 20, "shapes": 32}
# The functions of each kind of scene: a fixed split, and endless new scenes.
_DRAWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tetrominoes": (tetrominoes, tetromino_batch),
    "shapes": (scenes, scene_batch),
}
_MOST_OBJECTS = {"tetrominoes": PIECES, "shapes": 4}


def scene_source(options: TrainOptions, recipe: Recipe) -> DataSource:
    """Return the source that the options name; by default tetrominoes.

    Its validation is a tuple of suffixes of the scores' names with images [n h w c] uint8, and
    masks [n h w] uint8 or None.

    Raises: SaccadeError if there is no such data, or --set has fields that it lacks.
    """
    name, validation = options.data or "tetrominoes", recipe.extra["validation"]
    if name in _SIDES:
        return _generated(name, options, recipe, validation)
    given = sorted(set(SOURCE_FIELDS) & set(options.set))
    if given:
        raise SaccadeError(
            f"--set {given[0]}: only generated scenes have it, but the data is '{name}'. "
            "Leave it out, or pass --data tetrominoes or shapes."
        )
    return _pictures(name, options, recipe, validation)


def _generated(name: str, options: TrainOptions, recipe: Recipe, validation: int) -> DataSource:
    side = options.set.get("side_px", options.value("height_px", _SIDES[name]))
    if type(side) is not int:
        raise SaccadeError(f"--set side_px={side}: expected a whole number, such as 20, 24 or 35.")
    positions = options.set.get("positions", "anywhere")
    splits, batches = _DRAWN[name]
    like = splits("validation", validation, side_px=side, positions=positions)
    scored = [("", like.images, like.masks)]
    if positions != "anywhere":
        other = splits("validation", validation, side_px=side)
        scored.append(("_anywhere", other.images, other.masks))

    changes = ImageChanges(recipe)

    def draw(rng: np.random.Generator, count: int) -> dict[str, Any]:
        drawn = batches(rng, count, side_px=side, positions=positions)
        return {"images": changes.drawn(drawn.images, rng)[0]}

    # Training scenes are endless; the first of the split represent them.
    train = splits("train", CALIBRATION, side_px=side, positions=positions)
    return DataSource(
        name=name if positions == "anywhere" else f"{name} ({positions})",
        sha256={
            "train": _digest(train.images, train.masks),
            "validation": _digest(like.images, like.masks),
        },
        fields=_fields(name, side),
        draw=draw,
        validation=tuple(scored),
        calibration={"image": train.images, "masks": train.masks},
    )


def _fields(name: str, side: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "height_px": side,
        "width_px": side,
        "decoder_height": side,
        "decoder_width": side,
        "slots": _MOST_OBJECTS[name] + 1,  # one for the background
        "attention": "t-sa",
    }
    if name == "shapes":
        fields |= {"encoder_strides": (2, 1, 1), "attention": "ts-sa"}
    return fields


def _pictures(name: str, options: TrainOptions, recipe: Recipe, validation: int) -> DataSource:
    asked, side_px = options.asked, options.new_side_px
    known = tuple(_SIDES)
    training = segmented_images(name, "train", side_px=side_px, also=known, asked=asked)
    held_out = segmented_images(name, "validation", side_px=side_px, also=known, asked=asked)
    images, true = training.images, training.masks
    # The masks are not changed with the images, but training does not see them.
    changes = ImageChanges(recipe, images=images, originals=training.originals)
    _, height, width, channels = images.shape
    fields = _fields("shapes", height) | {"width_px": width, "decoder_width": width}
    fields |= {"channels": channels, "mean": (0.0,) * channels, "std": (1.0,) * channels}
    scored = held_out.first(validation)
    masks = None if scored.masks is None else np.asarray(scored.masks)

    def draw(rng: np.random.Generator, count: int) -> dict[str, Any]:
        return {"images": changes.chosen(rng.integers(len(images), size=count), rng)[0]}

    chosen = np.arange(CALIBRATION) % len(images)
    known_masks = {} if true is None else {"masks": true[chosen]}
    return DataSource(
        name=training.name,
        # The masks of the training images are not all read: only those for calibration are used.
        sha256={"train": training.images_sha256, "validation": held_out.sha256},
        fields=fields,
        draw=draw,
        validation=(("", np.asarray(scored.images), masks),),
        calibration={"image": images[chosen]} | known_masks,
    )


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256(repr([array.shape for array in arrays]).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


SMALL = {
    "encoder_channels": (64, 64, 64),
    "encoder_kernels": (5, 5, 5),
    "encoder_strides": (1, 1, 2),
    "slot_dim": 64,
    "qkv_dim": 64,
    "mlp_dim": 128,
    "grid_mlp_dim": 64,
    "decoder_channels": (64, 64, 64),
}
# Factor on the initial grid weights of the decoder: small ones paint blobs for thousands of steps.
GRID_GAIN = 4.0
# As in table 4: Adam, so no weight decay. The learning rate is higher and the run shorter.
QUICK = Recipe(
    steps=1000,
    batch=32,
    learning_rate=1e-3,
    config=SMALL,
    warm_up_steps=100,
    extra={"validation": 128},
    weight_decay=0.0,
    betas=(0.9, 0.999),
    clip_norm=0.5,
)
SHIPPED = replace(
    QUICK,
    steps=9_000,
    batch=16,
    learning_rate=8e-4,
    warm_up_steps=300,
    extra={"validation": 320},
)
# Further differences by `attention`: the baseline gets positions from a learned embedding.
KINDS: dict[str, dict[str, Any]] = {
    "sa": {"grid_embedding": "project_add", "grid_embedding_mlp": 64},
    "ts-sa": {"scales_factor": 5.0},
}


def task(options: TrainOptions) -> "SlotTask":
    """Train slot attention on tetrominoes (the default), shapes, or the user's own images.

    Masks are not trained on. If the data has some, they choose the best step.

    For generated scenes, `--set` also takes `positions=left`, which trains on objects in the left
    half only, and `side_px`, their size.

    Raises: SaccadeError if the data or the configuration cannot be used.
    """
    recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
    source = scene_source(options, recipe)
    return SlotTask(options, recipe, source)


class SlotTask(Task):
    """A `training.task.Task`. Initial positions and scales are drawn in every step."""

    family = "slot-attention"
    regularized_by = ("augment",)
    model: SlotModel

    def __init__(self, options: TrainOptions, recipe: Recipe, source: DataSource) -> None:
        self.recipe = recipe
        self.take(source)
        if all(masks is None for _, _, masks in source.validation):
            self.card = {"task": "reconstruction"}  # the one that needs no masks
        kind = options.value("attention", source.fields["attention"])
        apart = options.value("keys_see_grid", False)  # then the grid is appended, as usual
        parts = (recipe.config, source.fields, {} if apart else KINDS.get(kind, {}))
        config = chosen_config(SlotConfig, options, *parts, known=SOURCE_FIELDS)
        self.model = new_model(SlotModel, config)
        with torch.no_grad():
            self.model.decoder.project.weight.mul_(GRID_GAIN)

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """Return images [b h w c] uint8, and initial slots: noise [b k d], pose [b k p]."""
        config, count = self.model.config, self.recipe.batch
        batch = self.source.draw(rng, count)
        pose = random_pose(config, rng, count)
        learned = config.initial_slots == "learned"
        width = 0 if learned else config.slot_dim
        noise = rng.standard_normal((count, config.slots, width)).astype(np.float32)
        return batch | {"pose": torch.from_numpy(pose), "noise": torch.from_numpy(noise)}

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the squared error of the reconstruction, summed over pixels, mean over images."""
        model = self.model
        pixels = model.scale(batch["images"])
        start = model.initial(batch["noise"], batch["pose"])
        # The same function as the model's forward, in about half the time.
        state, _ = reordered_attention(model.attention)(model.encoder(pixels), start)
        painted = model.decoder(state).reconstruction
        return (painted - pixels).square().sum((1, 2, 3)).mean()

    def validate(self) -> dict[str, float]:
        """Return FG-ARI, first on scenes like in training; without masks, the negative error."""
        return {
            name: score
            for suffix, images, masks in self.source.validation
            for name, score in self._scores(suffix, images, masks).items()
        }

    def _scores(
        self, suffix: str, images: np.ndarray, masks: np.ndarray | None
    ) -> dict[str, float]:
        painted, segments = segmented(self.model, images)
        error = {"negative_mse" + suffix: -painted}
        if masks is None:
            return error
        fg_ari = adjusted_rand_index(masks, segments, foreground=True).mean()
        ari = adjusted_rand_index(masks, segments).mean()
        return {"fg_ari" + suffix: float(fg_ari), "ari" + suffix: float(ari)} | error


@torch.no_grad()
def segmented(
    model: SlotModel, images: np.ndarray, *, seed: int = 0, batch: int = 64
) -> tuple[float, np.ndarray]:
    """Return the mean squared error per value of the reconstructions, and each pixel's slot.

    Shapes: images [n h w c] uint8 -> segments [n H W] int64; image i starts from [seed, i].
    """
    states = initial_states(model.rule(), len(images), model.config.slots, seed=seed)
    device = model.decoder.grid.device
    errors, segments = [], []
    for start in range(0, len(images), batch):
        some = torch.from_numpy(images[start : start + batch]).to(device)
        state = torch.from_numpy(states[start : start + batch]).to(device)
        _, _, painting = model(some, state)
        difference = painting.reconstruction - model.scale(some)
        errors.append(difference.square().mean((1, 2, 3)).cpu().numpy())
        segments.append(segmentation(painting.alphas).cpu().numpy())
    return float(np.concatenate(errors).mean()), np.concatenate(segments)
