# SPDX-License-Identifier: Apache-2.0
"""Recipes of a NAC per data set: the defaults of `saccade train nac`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.data.augment import Augmentation
from saccade.models.training.task import Recipe

MAX_TOKENS = 256
WITHOUT_DECAY = ("codes", "signatures", "position", "norm", "alpha", "bias")
SETTABLE = ("counts_weight",)  # keys below that `--set` accepts besides the model's fields

CIRCUIT: dict[str, Any] = {
    "graph_weight": 0.1,  # weight of the graph structure regularizer
    "keep": (8, 64),  # fewest and most modules in a step with module dropout
    "validate_count": 1_000,  # most validation samples during training
    "budgets": (1.0, 0.5, 0.25, 0.125),  # scored on all validation samples at the end
}
EXTRA: dict[str, Any] = {
    **CIRCUIT,
    "epochs": 0,  # passes over the data, if no steps are given
    "epoch_steps": 0,  # steps per epoch; 0: one pass over the data
    "keep": (4, 32),
    "whole_share": 0.0,  # last share of the steps, in which all modules may be kept
    "curriculum_epochs": 0,  # first epochs of digits-sum, with one to four digits
    "canvases": False,  # endless new canvases instead of the training split (digits-sum)
    "counts_weight": 0.0,  # weight of the auxiliary losses (digits-sum), see `Auxiliary`; 0: none
    "augmentation": Augmentation(),
    "validate_count": 2_000,
    "budgets": (1.0, 0.5, 0.25, 0.2, 0.125),
}


def _recipe(**changes: Any) -> Recipe:
    fields = {key: value for key, value in changes.items() if key not in EXTRA}
    extra = EXTRA | {key: value for key, value in changes.items() if key in EXTRA}
    return Recipe(
        schedule="trapezoid",
        without_decay=WITHOUT_DECAY,
        extra=extra,
        **fields,
    )


DIGITS = _recipe(
    config={
        "patch_px": 4,
        "modules": 64,
        "dim": 48,
        "code_dim": 24,
        "ffn_dim": 96,
        "propagator_layers": 1,
        "graph_degree": 24.0,
        "dropout_draw": "log-uniform",
        "dropout_ordered": 0.7,
    },
    epochs=50,
    steps=800,
    batch=64,
    learning_rate=3e-3,
    label_smoothing=0.1,
    keep=(4, 16),
    whole_share=0.1,
    augmentation=Augmentation(shift_px=0.7, degrees=12, zoom=0.1),
)

DIGITS_SUM = _recipe(
    config={
        "patch_px": 6,  # a quarter of a digit: the read-in has to find the patches of a digit
        "tokenizer": "conv",
        "modules": 256,
        "dim": 64,
        "code_dim": 32,
        "ffn_dim": 128,
        "propagator_layers": 2,
        "graph_degree": 12.0,
        "dropout_draw": "log-uniform",
        "dropout_ordered": 0.7,
    },
    steps=4_000,
    epoch_steps=100,
    batch=64,
    learning_rate=2e-3,
    whole_share=0.25,
    curriculum_epochs=8,
    canvases=True,
    counts_weight=1.0,
    augmentation=Augmentation(shift_px=0.6, degrees=8, zoom=0.08),
    validate_every=1_000,
    validate_count=1_000,
    budgets=(1.0, 0.5, 0.25, 0.2, 0.125, 0.0625, 0.03125, 0.015625),
)


LOCAL = {"local_layers": 3, "local_width": 7}  # convolutions over neighboring characters
SEQUENCES = Recipe(
    steps=600,
    batch=32,
    learning_rate=2e-3,
    config={
        "modules": 64,
        "dim": 64,
        "code_dim": 32,
        "ffn_dim": 128,
        "propagator_layers": 2,
        "graph_degree": 24.0,
        "dropout_ordered": 0.7,
        "dropout_draw": "log-uniform",
    },
    without_decay=(*WITHOUT_DECAY, "embedding"),
    schedule="trapezoid",
    decay_share=0.3,
    label_smoothing=0.1,
    extra=CIRCUIT,
)
LISTOPS = replace(
    SEQUENCES,
    steps=1_000,
    batch=64,
    config={**SEQUENCES.config, **LOCAL},
    label_smoothing=0.0,
    # The weight of each list's value, read from its closing bracket's token.
    extra={**CIRCUIT, "values_weight": 1.0},
)


def recipe_for(data: str, height_px: int, width_px: int, *, patch_px: int = 0) -> Recipe:
    """Return the recipe of a data set that has one, or the one for images of this size.

    A trunk decides `patch_px`; 0: it is about an eighth of the image.

    Raises: SaccadeError if the sides have no common divisor that gives a useful patch.
    """
    if data == "digits":
        return DIGITS
    if data == "digits-sum":
        return DIGITS_SUM
    return _recipe(
        config={
            "tokenizer": "conv",
            "patch_px": patch_px or patch_side(height_px, width_px),
            "modules": 64,
            "dim": 64,
            "dropout_draw": "log-uniform",
        },
        epochs=30,
        steps=0,
        batch=64,
        learning_rate=2e-3,
        label_smoothing=0.1,
        augmentation=Augmentation(shift_px=max(height_px, width_px) / 16, degrees=8, zoom=0.1),
    )


def with_extra(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the part of `--set` that changes it: the auxiliary losses' weight.

    Raises: SaccadeError if the data has no such losses, or the weight is not at least 0.
    """
    extra = dict(recipe.extra)
    for key in SETTABLE:
        value = given.get(key, extra[key])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value >= 0):
            raise SaccadeError(f"--set {key}={value}: expected a number of at least 0.")
        if value and not extra["canvases"]:
            raise SaccadeError(
                f"--set {key}={value}: the auxiliary losses need the digits that an image shows, "
                "which only digits-sum has. Leave it out."
            )
        extra[key] = value
    return replace(recipe, extra=extra)


def with_epochs(recipe: Recipe, samples: int, *, steps: int | None) -> Recipe:
    """Return the recipe with its epochs converted to steps for this many training samples.

    It is validated once per epoch, but at most a hundred times.
    """
    epoch_steps = recipe.extra["epoch_steps"] or -(-samples // recipe.batch)
    total = steps or recipe.extra["epochs"] * epoch_steps or recipe.steps
    return replace(
        recipe,
        steps=total,
        validate_every=recipe.validate_every or max(epoch_steps, -(-total // 100)),
        extra={**recipe.extra, "epoch_steps": epoch_steps},
    )


def patch_side(height_px: int, width_px: int) -> int:
    wanted = max(height_px, width_px) / 8
    fitting = [
        side
        for side in range(1, min(height_px, width_px) // 2 + 1)
        if height_px % side == 0
        and width_px % side == 0
        and height_px * width_px // side**2 <= MAX_TOKENS
    ]
    if not fitting:
        raise SaccadeError(
            f"images of {height_px}x{width_px} px cannot be cut into 4 to {MAX_TOKENS} equal "
            "squares. Resize them, for example to 32x32 px."
        )
    return min(fitting, key=lambda side: abs(side - wanted))
