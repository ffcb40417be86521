# SPDX-License-Identifier: Apache-2.0
"""How each data set is learned: the one table of defaults behind `saccade train`."""

from dataclasses import dataclass, field
from typing import Any

from saccade.models.data.augment import Augmentation
from saccade.plugins.errors import SaccadeError

MAX_TOKENS = 256


@dataclass(frozen=True)
class Recipe:
    """Everything about a training run but its data and seed."""

    config: dict[str, Any]  # fields of NACConfig that are not read from the data
    epochs: int
    batch: int
    learning_rate: float
    steps: int | None = None  # of an epoch; none: once through the data
    weight_decay: float = 0.05  # of matrices; codes, signatures, positions and biases have none
    label_smoothing: float = 0.0
    warm_up_steps: int = 100
    graph_weight: float = 0.1  # of the graph structure regularizer
    keep: tuple[int, int] = (4, 32)  # fewest and most modules in a step with module dropout
    whole_share: float = 0.0  # last share of the steps, in which up to all modules may be kept
    decay_share: float = 0.25  # last share of the steps, in which the learning rate falls to 0
    curriculum_epochs: int = 0  # first epochs of digits-sum, in which one to four digits are shown
    counts_weight: float = 0.0  # of the auxiliary losses (digits-sum): see training_losses
    augmentation: Augmentation = field(default_factory=Augmentation)
    validate_epochs: int = 1  # epochs from one validation to the next
    validate_images: int = 2_000  # at most so many of the validation split
    budgets: tuple[float, ...] = (1.0, 0.5, 0.25, 0.2, 0.125)  # scored by the best epoch at the end


DIGITS = Recipe(
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
    batch=64,
    learning_rate=3e-3,
    label_smoothing=0.1,
    keep=(4, 16),
    whole_share=0.1,
    augmentation=Augmentation(shift_px=0.7, degrees=12, zoom=0.1),
)

DIGITS_SUM = Recipe(
    config={
        "patch_px": 12,
        "modules": 256,
        "dim": 64,
        "code_dim": 32,
        "ffn_dim": 128,
        "propagator_layers": 2,
        "graph_degree": 230.0,
        "dropout_draw": "log-uniform",
        "dropout_ordered": 0.7,
    },
    epochs=60,
    steps=100,
    batch=64,
    learning_rate=2e-3,
    whole_share=0.25,
    curriculum_epochs=8,
    counts_weight=1.0,
    augmentation=Augmentation(shift_px=0.6, degrees=8, zoom=0.08),
    validate_epochs=10,
    validate_images=1_000,
    budgets=(1.0, 0.5, 0.25, 0.2, 0.125, 0.0625, 0.03125, 0.015625),
)


def recipe_for(data: str, height_px: int, width_px: int) -> Recipe:
    """The recipe of a data set that has one, or the one for images of this size.

    Raises: SaccadeError if the sides have no common divisor that makes a useful patch.
    """
    if data == "digits":
        return DIGITS
    if data == "digits-sum":
        return DIGITS_SUM
    return Recipe(
        config={
            "tokenizer": "conv",
            "patch_px": _patch_px(height_px, width_px),
            "modules": 64,
            "dim": 64,
            "dropout_draw": "log-uniform",
        },
        epochs=30,
        batch=64,
        learning_rate=2e-3,
        label_smoothing=0.1,
        augmentation=Augmentation(shift_px=max(height_px, width_px) / 16, degrees=8, zoom=0.1),
    )


def _patch_px(height_px: int, width_px: int) -> int:
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
